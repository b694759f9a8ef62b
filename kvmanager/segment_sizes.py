"""How large a stored segment is, and where its parts begin: header, table, the layers' sections."""

import math
from typing import TypeAlias

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


def table_bytes(layers: int) -> int:
    """Return the size in bytes of the table of sections, padded to `ALIGNMENT`."""
    return -(-layers * ENTRY_BYTES // ALIGNMENT) * ALIGNMENT


def body_offset(layers: int) -> int:
    """Return where the first layer's section begins in a stored segment: a multiple of `ALIGNMENT`."""
    return HEADER_BYTES + table_bytes(layers)


def sealed_bytes(shape: Shape, dtype: str) -> int:
    """Return the size in bytes of a segment that is stored raw, header included. Raises as `payload_bytes`."""
    return body_offset(shape[0]) + payload_bytes(shape, dtype)
