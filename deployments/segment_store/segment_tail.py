"""What lies behind a raw segment in the CPU tier, for the way to Redis: the tail.

::

    sealed segment (its header says how long), magic (8), xxh3_128 of the content (16), content

It never leaves the node: a reader of the segment leaves it out, and so does the way to Redis, where a damaged tail is
none. What a tail is good for, the form knows that is made by it (`deployments.segment_store.stored_form`). Pure
functions: any thread.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import xxhash

from kvmanager.segments.format import Buffer, SegmentMismatch, read_header

_MAGIC = b"CKVMASS\0"
_DIGEST_BYTES = 16
TAIL_HEAD_BYTES = len(_MAGIC) + _DIGEST_BYTES


def with_tail(sealed: np.ndarray[Any, np.dtype[np.uint8]], content: bytes) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A sealed raw segment with a tail behind it."""
    tail = np.frombuffer(_MAGIC + xxhash.xxh3_128_digest(content) + content, np.uint8)
    return np.concatenate((sealed, tail))


def without_tail(buffer: memoryview) -> memoryview:
    """The sealed segment of what a tier holds, not verified; all of it where no tail is behind it."""
    end = _sealed_end(buffer)
    return buffer if end is None else buffer[:end]


def split_tail(buffer: Buffer) -> tuple[memoryview, memoryview | None]:
    """The sealed segment of what a tier holds, not verified, and its tail's content; None: none, or a damaged one."""
    view = memoryview(buffer).cast("B")
    end = _sealed_end(view)
    if end is None:
        return view, None
    digest, content = bytes(view[end + len(_MAGIC) : end + TAIL_HEAD_BYTES]), view[end + TAIL_HEAD_BYTES :]
    return view[:end], content if xxhash.xxh3_128_digest(content) == digest else None


def _sealed_end(view: memoryview) -> int | None:
    """Where a sealed segment ends that has a tail behind it; None: it has none, or is none."""
    try:
        end = read_header(view).sealed_bytes
    except SegmentMismatch:
        return None
    return end if bytes(view[end : end + len(_MAGIC)]) == _MAGIC else None
