"""Codec profiles in Redis: the profile of a lossy form lies next to the segments, once, under its digest.

A profile is a hash of one field, so that an ACL user needs no further commands. It lies outside every model's prefix:
no scan of segments meets it.

* It outlives the segments coded with it: the writer of a segment renews its profile first, for longer than the segment,
  and the Redis tier renews all of them now and then, because segments that are used are renewed too.
* What is read is bounded in size, and was stored under the server's secret: nothing else is given to a parser. It is
  the caller's to verify by its digest.
* The first time that a process needs a profile it writes it, whatever lies there: perhaps another secret's.
"""

from __future__ import annotations

from typing import Any

import redis

from deployments.segment_store.base import StoreUnavailableError
from deployments.segment_store.redis_connection import SCAN_COUNT, connect, explain
from kvmanager.segments.guard import ContentTag

FIELD = "t"
"""The profile after its keyed tag."""
MOST_PROFILE_BYTES = 16 << 20
"""Far more than a profile of any model has: some kilobytes per layer."""
MARGIN_S = 3600
"""Time that a profile outlives a segment, though it was renewed before the segment was written."""


class RedisProfiles:
    """Profiles below `prefix`. Connects at its first call; each blocks for up to `deadline_s` per answer. Any thread.

    `expire_s` is the segments', 0: they do not expire.
    """

    def __init__(self, url: str, prefix: bytes, deadline_s: float, expire_s: int, tags: ContentTag) -> None:
        self._client = connect(url, deadline_s)
        self._url = url
        self._prefix = prefix
        self._tags = tags
        self._written: set[bytes] = set()
        self._expire_ms = 1000 * (expire_s + MARGIN_S) if expire_s else 0

    def get(self, digest: bytes) -> bytes | None:
        """The bytes of a profile; None for none, for others', or far too many. Raises StoreUnavailableError."""
        name = self._name(digest)
        try:
            if not 0 < self._client.hstrlen(name, FIELD) <= MOST_PROFILE_BYTES:
                return None
            found: Any = self._client.hmget(name, [FIELD])[0]
        except redis.RedisError as error:
            raise self._unavailable(error) from error
        return None if found is None else self._tags.content(name, found)

    def keep(self, digest: bytes, content: bytes) -> None:
        """Have a profile there, for longer than a segment written after this. Raises StoreUnavailableError."""
        name = self._name(digest)
        try:
            there = self._client.pexpire(name, self._expire_ms) if self._expire_ms else self._client.hlen(name)
            if not there or digest not in self._written:
                pipeline = self._client.pipeline(transaction=False)
                pipeline.unlink(name)
                pipeline.hset(name, FIELD, self._tags.tagged(name, content))
                if self._expire_ms:
                    pipeline.pexpire(name, self._expire_ms)
                pipeline.execute()
                self._written.add(digest)
        except redis.RedisError as error:
            raise self._unavailable(error) from error

    def renew_all(self) -> None:
        """Keep all that are there for longer than any segment that is renewed now. Raises StoreUnavailableError."""
        if not self._expire_ms:
            return
        try:
            for name in self._client.scan_iter(match=self._prefix + b"*", count=SCAN_COUNT):
                self._client.pexpire(name, self._expire_ms)
        except redis.RedisError as error:
            raise self._unavailable(error) from error

    def _name(self, digest: bytes) -> bytes:
        return self._prefix + digest.hex().encode()

    def _unavailable(self, error: redis.RedisError) -> StoreUnavailableError:
        return StoreUnavailableError(explain(self._url, error))
