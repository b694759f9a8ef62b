"""The entries of a Redis by their names: how ours are called, and those of other models in an embedded one.

A store that only reads and writes segments is given their prefix.
"""

from __future__ import annotations

import re
from typing import Any

import redis

from configs.kv_section import REDIS_NAMESPACE
from deployments.segment_store.redis_connection import SCAN_COUNT

KEY_ROOT = b"crosskv:1:"
"""Of everything that crosskv keeps in a Redis; 1 is the version of this naming."""
FULL_SHARE = 0.95
"""Of the budget, in memory that Redis uses, from which neighbours leave."""
FREE_SHARE = 0.85
"""Share of the budget down to which they leave. The difference is what may be written between two looks
(`deployments.redis_tier.config.RedisTimes`)."""
BATCH = 64
"""Segments deleted before Redis is asked again what it uses: some hundred MB."""

_SEGMENT = re.compile(re.escape(KEY_ROOT) + REDIS_NAMESPACE.encode() + rb":[0-9a-f]{16}:[0-9a-f]{64}")
_PROFILE = re.compile(re.escape(KEY_ROOT) + REDIS_NAMESPACE.encode() + rb":profile:[0-9a-f]{32}")


def namespace_root(namespace: str) -> bytes:
    """What all keys of a deployment begin with. Raises ValueError for a namespace that cannot be part of a key."""
    if not re.fullmatch(REDIS_NAMESPACE, namespace):
        raise ValueError(
            f"kv.redis_namespace {namespace!r} cannot be part of a key: use 1 to 64 letters, digits, '_', '.' or '-'"
        )
    return KEY_ROOT + namespace.encode() + b":"


def segment_prefix(namespace: str, fingerprint: bytes) -> bytes:
    """What the names of one model's segments begin with. Raises ValueError as `namespace_root`."""
    return namespace_root(namespace) + _model(fingerprint) + b":"


def owner_key(namespace: str, fingerprint: bytes) -> bytes:
    """The key of the claim on those segments; it does not begin as they do. Raises ValueError as `namespace_root`."""
    return namespace_root(namespace) + b"owner:" + _model(fingerprint)


def _model(fingerprint: bytes) -> bytes:
    return fingerprint.hex()[:16].encode()  # short for people; the header holds the whole


class Neighbours:
    """Entries of other models and namespaces in an embedded Redis, kept for the day when they are served again.

    A server that changes its model finds the KV of the one before when it changes back. Until then that takes only room
    that the present model does not need: when Redis is nearly full of all that lies in it, *neighbours* leave first.
    Those next to expire, which are the least recently used, leave before the others. Only names of segments and codec
    profiles are kept; everything else in a Redis of our own belongs to no model and is deleted.

    Blocks; one thread at a time. Raises redis.RedisError. `prefix`: what the names of our own segments begin with.
    """

    def __init__(self, client: redis.Redis, prefix: bytes, budget_bytes: int) -> None:
        self._client = client
        self._prefix = prefix
        self._budget_bytes = budget_bytes
        self.segments = 0
        """Known number of them; nothing is looked for when there are none."""

    def survey(self) -> int:
        """Count them, and delete what is neither a segment nor a profile; returns how much that was."""
        deleted, segments = 0, 0
        for names in self._names():
            foreign = [name for name in names if not name.startswith(self._prefix)]
            segments += len(segments_of := [name for name in foreign if _SEGMENT.fullmatch(name)])
            kept = set(segments_of)
            if nobodys := [name for name in foreign if name not in kept and not _PROFILE.fullmatch(name)]:
                deleted += int(self._client.unlink(*nobodys))
        self.segments = segments
        return deleted

    def make_room(self, used_memory_bytes: int) -> int:
        """Let neighbours leave if Redis is nearly full; returns how many did. O(keys) then, else O(1)."""
        if not self.segments or used_memory_bytes <= FULL_SHARE * self._budget_bytes:
            return 0
        left = self._those_first_to_go()
        gone = 0
        while left and self._used_bytes() > FREE_SHARE * self._budget_bytes:
            # Not unlinked: their memory must be free when Redis is asked again.
            gone += int(self._client.delete(*left[-BATCH:]))
            del left[-BATCH:]
        self.segments = len(left)
        return gone

    def _those_first_to_go(self) -> list[bytes]:
        """All of them, the next to go last. What never expires is the newest."""
        found: list[tuple[float, bytes]] = []
        for names in self._names():
            segments = [name for name in names if not name.startswith(self._prefix) and _SEGMENT.fullmatch(name)]
            pipeline = self._client.pipeline(transaction=False)
            for name in segments:
                pipeline.pttl(name)
            for name, left_ms in zip(segments, pipeline.execute(), strict=True):
                found.append((float("inf") if left_ms < 0 else float(left_ms), name))
        return [name for _, name in sorted(found, reverse=True)]

    def _names(self) -> list[list[bytes]]:
        chunks: list[list[bytes]] = []
        seen: set[bytes] = set()  # SCAN may name a key twice
        cursor = -1
        while cursor != 0:
            answer: Any = self._client.scan(max(cursor, 0), count=SCAN_COUNT)
            cursor, names = answer
            chunks.append([name for name in dict.fromkeys(names) if name not in seen])
            seen.update(names)
        return chunks

    def _used_bytes(self) -> int:
        return int(self._client.info("memory")["used_memory"])
