"""What lies in Redis, read anew for each of its lives: the headers, not the payloads."""

from __future__ import annotations

from dataclasses import dataclass

from deployments.redis_endpoint import RedisEndpoint, open_store
from deployments.redis_store import RedisStore
from kvmanager.segment_format import SegmentHeader


@dataclass(frozen=True, slots=True)
class RedisIndex:
    """`headers` are ordered by start block, so parents come first; `foreign` counts deleted entries of other models."""

    headers: list[SegmentHeader]
    unusable: list[bytes]
    foreign: int


def read_index(endpoint: RedisEndpoint, *, ours_alone: bool) -> RedisIndex:
    """Scan Redis; blocks for as long as that takes. In a Redis that is `ours_alone`, other models' entries are deleted.

    Raises StoreUnavailableError.
    """
    foreign = 0
    if ours_alone:
        store = RedisStore(endpoint.url, endpoint.prefix, endpoint.deadline_s, endpoint.expire_s)
        foreign = store.delete_foreign(but=endpoint.profile_prefix)
    headers: list[SegmentHeader] = []
    unusable: list[bytes] = []
    for chunk in open_store(endpoint).scan():
        headers += chunk.headers
        unusable += chunk.unusable
    headers.sort(key=lambda header: header.start_block)
    return RedisIndex(headers, unusable, foreign)
