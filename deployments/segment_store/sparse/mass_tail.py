"""The attention mass of a raw segment, behind it in the CPU tier: what decides which tokens a sparse copy keeps.

::

    sealed segment (its header says how long), magic (8), xxh3_128 of the mass (16), float16 (layers, kv_heads, tokens)

It never leaves the node: a reader of the segment leaves it out, and so does the way to Redis, where a damaged mass is
none. A segment without one is never sparse. Pure functions: any thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash

from kvmanager.segments.format import Buffer, SegmentMismatch, read_header

Mass = np.ndarray[Any, np.dtype[np.float16]]
"""(layers, kv_heads, tokens)."""
_MAGIC = b"CKVMASS\0"
_DIGEST_BYTES = 16
_HEAD_BYTES = len(_MAGIC) + _DIGEST_BYTES


def mass_bytes(layers: int, kv_heads: int, tokens: int) -> int:
    """What the mass of a segment takes behind it."""
    return _HEAD_BYTES + 2 * layers * kv_heads * tokens


def with_mass(sealed: np.ndarray[Any, np.dtype[np.uint8]], mass: Mass) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A sealed raw segment with its mass behind it."""
    content = np.ascontiguousarray(mass, np.float16).tobytes()
    tail = np.frombuffer(_MAGIC + xxhash.xxh3_128_digest(content) + content, np.uint8)
    return np.concatenate((sealed, tail))


def without_mass(buffer: memoryview) -> memoryview:
    """The sealed segment of what a tier holds, not verified; all of it where no mass is behind it."""
    end = _sealed_end(buffer)
    return buffer if end is None else buffer[:end]


def split_mass(buffer: Buffer) -> tuple[memoryview, Mass | None]:
    """The sealed segment of what a tier holds, not verified, and its mass; None for none, or for a damaged one."""
    view = memoryview(buffer).cast("B")
    end = _sealed_end(view)
    if end is None:
        return view, None
    digest, content = bytes(view[end + len(_MAGIC) : end + _HEAD_BYTES]), view[end + _HEAD_BYTES :]
    layers, _, tokens, heads, _ = read_header(view).shape
    if len(content) != 2 * layers * heads * tokens or xxhash.xxh3_128_digest(content) != digest:
        return view[:end], None
    return view[:end], np.frombuffer(content, np.float16).reshape(layers, heads, tokens)


def _sealed_end(view: memoryview) -> int | None:
    """Where a sealed segment ends that has a mass behind it; None: it has none, or is none."""
    try:
        end = read_header(view).sealed_bytes
    except SegmentMismatch:
        return None
    return end if bytes(view[end : end + len(_MAGIC)]) == _MAGIC else None
