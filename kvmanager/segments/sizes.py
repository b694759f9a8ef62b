"""How large a stored segment is, and where its parts begin: head, table, the layers' sections."""

import math
from functools import lru_cache
from typing import TypeAlias

from kvmanager.segments.keys import HASH_BYTES

MOST_SEGMENT_BYTES = 1 << 30
"""Of a raw segment: a header that states more was not written here, and nothing is allocated for it."""
MOST_SEGMENT_BLOCKS = 1024
"""Of a segment: a reader that lists the heads of all segments of a Redis holds the hashes of this many blocks."""
MOST_BYTES_IN_FLIGHT = 128 << 20
"""Of segments that a node fetches from Redis at a time; a larger one goes through by itself."""

Shape: TypeAlias = tuple[int, int, int, int, int]
"""(layers, 2, tokens, kv_heads, head_dim) of keys and values; (layers, 1, tokens, 1, width) of latents."""

LATENT_HALVES = 1
"""In the second place of a shape: a latent (MLA) is one vector, and neither key nor value."""

HEADER_BYTES = 256
"""Of the header's fields; the hashes of the segment's blocks follow."""
CHECKSUM_BYTES = 16
CHECKED_BYTES = 32 << 10
"""Of a raw layer's keys or values, that one checksum is over at least: with less, calls cost more than bytes."""
ENTRY_BYTES = 24
"""Of a coded segment's table, per layer."""
ALIGNMENT = 64
"""Of the first section, so that it is aligned in an aligned buffer."""
SLACK_BYTES = 4096
"""Per layer, by which a coded body may exceed the raw one at most: a codec's tables of its own."""
BYTES = "uint8"
"""The dtype of KV whose elements only its engine knows (fp8): nothing but its raw form can be stored."""
ITEM_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, BYTES: 1}
"""By dtype."""


def payload_bytes(shape: Shape, dtype: str) -> int:
    """Return the size in bytes of all raw sections. Raises ValueError for a dtype or shape that cannot be stored."""
    if dtype not in ITEM_BYTES:
        raise ValueError(f"cannot store KV of dtype {dtype!r}; the format knows {sorted(ITEM_BYTES)}")
    if len(shape) != 5 or min(shape) < 1 or (shape[1] != 2 and (shape[1], shape[3]) != (LATENT_HALVES, 1)):
        raise ValueError(
            "a segment has shape (layers, 2, tokens, kv_heads, head_dim), or of latents (layers, 1, tokens, 1, width), "
            f"got {shape}"
        )
    return math.prod(shape) * ITEM_BYTES[dtype]


def check_segment_bytes(nbytes: int, segment_tokens: int, num_blocks: int) -> str | None:
    """Return a sentence about segments of ``nbytes`` that are slow to move; None where there is nothing to say.

    Raises ValueError, which says what works, where they cannot be stored at all.
    """
    if num_blocks > MOST_SEGMENT_BLOCKS:
        raise ValueError(
            f"kv.segment_tokens: {segment_tokens} tokens are {num_blocks} blocks, more than the {MOST_SEGMENT_BLOCKS} "
            f"that a segment can have; use at most {segment_tokens // num_blocks * MOST_SEGMENT_BLOCKS}"
        )
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


def head_bytes(num_blocks: int) -> int:
    """Return the size in bytes of a segment's head: its header and the hashes of its blocks."""
    return HEADER_BYTES + HASH_BYTES * num_blocks


def blocks_per_checksum(shape: Shape, dtype: str, num_blocks: int) -> int:
    """Return over how many consecutive blocks of a raw layer's keys or values one checksum is; the last has the rest.

    Raises as `payload_bytes`.
    """
    run_bytes = payload_bytes(shape, dtype) // (shape[1] * shape[0] * num_blocks)
    return min(num_blocks, -(-CHECKED_BYTES // max(1, run_bytes)))


def layer_table_bytes(shape: Shape, dtype: str, num_blocks: int) -> int:
    """Return the size in bytes of what a raw segment's table has for a layer. Raises as `payload_bytes`."""
    return shape[1] * CHECKSUM_BYTES * -(-num_blocks // blocks_per_checksum(shape, dtype, num_blocks))


@lru_cache(maxsize=256)
def body_offset(shape: Shape, dtype: str, num_blocks: int) -> int:
    """Return where the first layer's section begins in a raw segment: a multiple of `ALIGNMENT`.

    Raises as `payload_bytes`.
    """
    return _aligned(head_bytes(num_blocks) + shape[0] * layer_table_bytes(shape, dtype, num_blocks))


def coded_body_offset(layers: int, num_blocks: int) -> int:
    """Return where the first layer's section begins in a coded segment: a multiple of `ALIGNMENT`."""
    return _aligned(head_bytes(num_blocks) + layers * ENTRY_BYTES)


def sealed_bytes(shape: Shape, dtype: str, num_blocks: int) -> int:
    """Return the size in bytes of a segment that is stored raw, head included. Raises as `payload_bytes`."""
    return body_offset(shape, dtype, num_blocks) + payload_bytes(shape, dtype)


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
