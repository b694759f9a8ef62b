"""Interface and errors of a store of sealed segments: the one interface of the Redis tier's layers.

The layers, from the outside in: `CheckedStore` (nothing unverified gets out), `GuardedStore` (nothing gets in that was
not stored under the server's secret), `RedisStore` (the transport). `deployments.segment_store.endpoint.open_store`
puts them together. Every method blocks, may be called from any thread, and raises nothing but the errors below (and
SegmentMismatch, from the outer two).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol, TypeAlias

from kvmanager.segments.format import Buffer

OwnBuffer: TypeAlias = bytearray | memoryview
"""Writable, and the caller's alone."""


class StoreUnavailableError(Exception):
    """The store did not answer, or refused to; says nothing about the segment. The message is a sentence for people."""


class StoreTimeoutError(StoreUnavailableError):
    """It did not answer within its deadline, so the next call may wait as long."""


class StoreFullError(Exception):
    """The store takes nothing more until something was deleted."""


class StoreWrongTypeError(Exception):
    """Something that is not a segment lies under the segment's key."""


class StoredHeader(NamedTuple):
    """The header of one entry. `total_bytes` is -1 for an entry that is not a whole segment, or is none at all."""

    key: bytes
    head: bytes
    total_bytes: int


class SegmentStore(Protocol):
    """Sealed segments by key. A layer need not know what is in them."""

    def get(self, key: bytes) -> OwnBuffer | None:
        """The whole segment; None when there is none. Raises StoreWrongTypeError, StoreUnavailableError."""
        ...

    def put(self, key: bytes, header: Buffer, body: Buffer) -> None:
        """Store a segment, in two contiguous buffers, in place of what was there.

        Raises StoreFullError, StoreUnavailableError.
        """
        ...

    def delete(self, keys: Sequence[bytes]) -> int:
        """Delete what exists of `keys`; returns how many did. Raises StoreUnavailableError."""
        ...

    def headers(self) -> Iterator[list[StoredHeader]]:
        """Every entry once, in chunks, in no order. Entries that come or go meanwhile may be missing or listed."""
        ...
