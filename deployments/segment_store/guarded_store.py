"""The layer of the segment store that keeps out what was not stored under the server's secret.

What comes from below is bytes that anybody may have written: nothing above this layer sees them before their keyed
checksum is verified (`kvmanager.segments.guard`). Any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from deployments.segment_store.base import OwnBuffer, SegmentStore, StoredHeader
from kvmanager.segments.format import Buffer, SegmentMismatch
from kvmanager.segments.guard import SALT_BYTES, SegmentGuard


class GuardedStore:
    """Any `SegmentStore`, guarded. `draw` returns so many random bytes."""

    def __init__(self, inner: SegmentStore, guard: SegmentGuard, draw: Callable[[int], bytes]) -> None:
        self._inner = inner
        self._guard = guard
        self._draw = draw

    def get(self, key: bytes) -> OwnBuffer | None:
        """The segment, opened. Raises SegmentMismatch too."""
        guarded = self._inner.get(key)
        return None if guarded is None else self._guard.open(guarded)

    def put(self, key: bytes, header: Buffer, body: Buffer) -> None:
        """See `SegmentStore.put`."""
        self._inner.put(key, *self._guard.guard(header, body, self._draw(SALT_BYTES)))

    def delete(self, keys: Sequence[bytes]) -> int:
        """See `SegmentStore.delete`."""
        return self._inner.delete(keys)

    def headers(self) -> Iterator[list[StoredHeader]]:
        """See `SegmentStore.headers`; the head of an entry that is refused is empty."""
        for entries in self._inner.headers():
            yield [entry._replace(head=self._opened(entry.head)) for entry in entries]

    def _opened(self, head: bytes) -> bytes:
        try:
            return bytes(self._guard.open_header(head))
        except SegmentMismatch:
            return b""
