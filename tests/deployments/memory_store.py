"""Redis' place in memory, for tests of what codes and checks above it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from deployments.segment_store.base import StoredHeader, StoreUnavailableError
from deployments.segment_store.segment_codecs import Coding
from kvmanager.segments.format import stated_head_bytes

CODING = Coding("lossless", "cachegen", 2)


class MemoryStore:
    """A `SegmentStore`."""

    def __init__(self) -> None:
        self.held: dict[bytes, bytes] = {}

    def get(self, key: bytes) -> bytearray | None:
        held = self.held.get(key)
        return None if held is None else bytearray(held)

    def put(self, key: bytes, header: Any, body: Any) -> None:
        self.held[key] = bytes(header) + bytes(body)

    def delete(self, keys: Sequence[bytes]) -> int:
        return sum(self.held.pop(key, None) is not None for key in keys)

    def headers(self) -> Iterator[list[StoredHeader]]:
        yield [StoredHeader(key, sealed[: stated_head_bytes(sealed)], len(sealed)) for key, sealed in self.held.items()]


class MemoryProfiles:
    def __init__(self) -> None:
        self.held: dict[bytes, bytes] = {}
        self.asked: list[bytes] = []
        self.reachable = True

    def get(self, digest: bytes) -> bytes | None:
        self.asked.append(digest)
        if not self.reachable:
            raise StoreUnavailableError("gone")
        return self.held.get(digest)

    def keep(self, digest: bytes, content: bytes) -> None:
        self.held[digest] = content
