"""Codec profiles in Redis: what a lossy form was coded with lies beside the segments, once, under its digest.

A profile is a hash of one field, so that an ACL user needs no further commands. It lies outside every model's prefix:
no scan of segments meets it, and clearing other models' segments leaves it (`RedisStore.delete_foreign`).

* It outlives what was coded with it: whoever writes a segment renews its profile first, for longer than the segment.
* What is read is bounded in size, and is the caller's to verify by its digest.
"""

from __future__ import annotations

from typing import Any

import redis

from deployments.redis_connection import connect, explain
from deployments.segment_store import StoreUnavailableError

FIELD = "p"
MOST_PROFILE_BYTES = 16 << 20
"""Far more than a profile of any model has: some kilobytes per layer."""
MARGIN_S = 3600
"""So much longer than a segment a profile stays, though it was renewed before that was written."""


class RedisProfiles:
    """Profiles below `prefix`. Connects at its first call; each blocks for up to `deadline_s` per answer. Any thread.

    `expire_s` is the segments', 0: they do not expire.
    """

    def __init__(self, url: str, prefix: bytes, deadline_s: float, expire_s: int) -> None:
        self._client = connect(url, deadline_s)
        self._url = url
        self._prefix = prefix
        self._expire_ms = 1000 * (expire_s + MARGIN_S) if expire_s else 0

    def get(self, digest: bytes) -> bytes | None:
        """The bytes of a profile, not verified; None for none, or far too many. Raises StoreUnavailableError."""
        name = self._name(digest)
        try:
            if not 0 < self._client.hstrlen(name, FIELD) <= MOST_PROFILE_BYTES:
                return None
            found: Any = self._client.hmget(name, [FIELD])[0]
        except redis.RedisError as error:
            raise self._unavailable(error) from error
        return found

    def keep(self, digest: bytes, content: bytes) -> None:
        """Have a profile there, for longer than a segment written after this. Raises StoreUnavailableError."""
        name = self._name(digest)
        try:
            there = self._client.pexpire(name, self._expire_ms) if self._expire_ms else self._client.hlen(name)
            if not there:
                pipeline = self._client.pipeline(transaction=False)
                pipeline.hset(name, FIELD, content)
                if self._expire_ms:
                    pipeline.pexpire(name, self._expire_ms)
                pipeline.execute()
        except redis.RedisError as error:
            raise self._unavailable(error) from error

    def _name(self, digest: bytes) -> bytes:
        return self._prefix + digest.hex().encode()

    def _unavailable(self, error: redis.RedisError) -> StoreUnavailableError:
        return StoreUnavailableError(explain(self._url, error))
