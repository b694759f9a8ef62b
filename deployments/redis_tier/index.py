"""What lies in Redis, read anew for each of its lives: the headers, not the payloads."""

from __future__ import annotations

from dataclasses import dataclass

from deployments.segment_store.endpoint import RedisEndpoint, open_store
from kvmanager.segments.format import SegmentHeader


@dataclass(frozen=True, slots=True)
class RedisIndex:
    """`headers` are ordered by start block, so parents come first."""

    headers: list[SegmentHeader]
    unusable: list[bytes]


def read_index(endpoint: RedisEndpoint) -> RedisIndex:
    """Scan Redis; blocks for as long as that takes. Raises StoreUnavailableError."""
    headers: list[SegmentHeader] = []
    unusable: list[bytes] = []
    for chunk in open_store(endpoint).scan():
        headers += chunk.headers
        unusable += chunk.unusable
    headers.sort(key=lambda header: header.start_block)
    return RedisIndex(headers, unusable)
