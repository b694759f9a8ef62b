"""The outermost layer of a segment store: what is not exactly the segment that was stored does not get out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from deployments.segment_store.base import SegmentStore, StoredHeader
from kvmanager.segments.format import (
    Buffer,
    SegmentHeader,
    SegmentMismatch,
    read_header,
    stated_head_bytes,
    verify,
)
from kvmanager.segments.forms import stated_form
from kvmanager.segments.keys import SegmentKey


@dataclass(frozen=True, slots=True)
class ScannedChunk:
    """A part of what the store holds: headers that can be relied on, and the keys of entries that cannot be used."""

    headers: list[SegmentHeader]
    unusable: list[bytes]
    forms: dict[SegmentKey, bytes] = field(default_factory=dict)
    """Of those that are not dense (`kvmanager.segments.forms`)."""


class CheckedStore:
    """Verifies all that `inner` returns against one model's `fingerprint`. Safe from any thread if `inner` is."""

    def __init__(self, inner: SegmentStore, fingerprint: bytes) -> None:
        self._inner = inner
        self._fingerprint = fingerprint

    def get(self, key: bytes) -> Buffer | None:
        """The verified segment. Raises SegmentMismatch, StoreWrongTypeError, StoreUnavailableError."""
        sealed = self._inner.get(key)
        if sealed is not None:
            verify(sealed, key=key, fingerprint=self._fingerprint)
        return sealed

    def put(self, key: bytes, sealed: Any) -> None:
        """Store a sealed segment, a contiguous buffer. See `SegmentStore.put`; raises SegmentMismatch too."""
        view = memoryview(sealed).cast("B")
        head = stated_head_bytes(view)
        self._inner.put(key, view[:head], view[head:])

    def delete(self, keys: Sequence[bytes]) -> int:
        """See `SegmentStore.delete`."""
        return self._inner.delete(keys)

    def scan(self) -> Iterator[ScannedChunk]:
        """All entries by their headers; payloads are not read, and verified when they are loaded."""
        for entries in self._inner.headers():
            chunk = ScannedChunk([], [])
            for entry in entries:
                header = self._usable(entry)
                if header is None:
                    chunk.unusable.append(entry.key)
                else:
                    chunk.headers.append(header)
                    if not header.is_dense:
                        chunk.forms[SegmentKey(header.key)] = stated_form(entry.head)
            yield chunk

    def _usable(self, entry: StoredHeader) -> SegmentHeader | None:
        try:
            header = read_header(entry.head)
        except SegmentMismatch:
            return None
        belongs = header.key == entry.key and header.fingerprint == self._fingerprint
        return header if belongs and header.sealed_bytes == entry.total_bytes else None
