"""How large a stored segment is, and where its parts begin: header, table, the layers' sections."""

import math
from typing import TypeAlias

MOST_SEGMENT_BYTES = 1 << 30
"""Of a raw segment: a header that states more was not written here, and nothing is allocated for it."""
MOST_BYTES_IN_FLIGHT = 128 << 20
"""Of segments that a node fetches from Redis at a time; a larger one goes through by itself."""

Shape: TypeAlias = tuple[int, int, int, int, int]
"""(layers, 2, tokens, kv_heads, head_dim)"""

HEADER_BYTES = 256
ENTRY_BYTES = 24
"""Of the table, per layer."""
ALIGNMENT = 64
"""Of the first section, so that it is aligned in an aligned buffer."""
SLACK_BYTES = 4096
"""Per layer, by which a coded body may exceed the raw one at most: a codec's tables of its own."""
ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4}
"""By dtype."""


def payload_bytes(shape: Shape, dtype: str) -> int:
    """Return the size in bytes of all raw sections. Raises ValueError for a dtype or shape that cannot be stored."""
    if dtype not in ITEM_BYTES:
        raise ValueError(f"cannot store KV of dtype {dtype!r}; the format knows {sorted(ITEM_BYTES)}")
    if len(shape) != 5 or shape[1] != 2 or min(shape) < 1:
        raise ValueError(f"a segment has shape (layers, 2, tokens, kv_heads, head_dim), got {shape}")
    return math.prod(shape) * ITEM_BYTES[dtype]


def check_segment_bytes(nbytes: int, segment_tokens: int) -> str | None:
    """Return a sentence about segments of so many bytes that are slow to move; None where there is nothing to say.

    Raises ValueError, which says what works, where they cannot be stored at all.
    """
    if nbytes > MOST_SEGMENT_BYTES:
        raise ValueError(
            f"kv.segment_tokens: {segment_tokens} tokens of this model's KV are a segment of {nbytes >> 20} MiB, more "
            f"than the {MOST_SEGMENT_BYTES >> 20} MiB that can be stored; use at most "
            f"{segment_tokens * MOST_SEGMENT_BYTES // nbytes}, a multiple of the block size"
        )
    if nbytes > MOST_BYTES_IN_FLIGHT:
        return (
            f"segments of {nbytes >> 20} MiB come from Redis one at a time; with kv.segment_tokens of at most "
            f"{segment_tokens * MOST_BYTES_IN_FLIGHT // nbytes} several would at once"
        )
    return None


def table_bytes(layers: int) -> int:
    """Return the size in bytes of the table of sections, padded to `ALIGNMENT`."""
    return -(-layers * ENTRY_BYTES // ALIGNMENT) * ALIGNMENT


def body_offset(layers: int) -> int:
    """Return where the first layer's section begins in a stored segment: a multiple of `ALIGNMENT`."""
    return HEADER_BYTES + table_bytes(layers)


def sealed_bytes(shape: Shape, dtype: str) -> int:
    """Return the size in bytes of a segment that is stored raw, header included. Raises as `payload_bytes`."""
    return body_offset(shape[0]) + payload_bytes(shape, dtype)
