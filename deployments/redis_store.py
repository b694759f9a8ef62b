"""Segments as Redis strings: the transport, which knows keys and commands, and not what a segment is.

A segment lies under `prefix` + its key in hexadecimal, which people can read in redis-cli. Entries below the prefix
whose name is no such key are not ours and are not touched.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import redis

from deployments.redis_connection import connect, explain
from deployments.segment_store import (
    StoredHeader,
    StoreFullError,
    StoreTimeoutError,
    StoreUnavailableError,
    StoreWrongTypeError,
)
from kvmanager.keys import HASH_BYTES
from kvmanager.segment_format import HEADER_BYTES

SCAN_COUNT = 1000
BATCH = 500
"""Commands of one pipeline: few round trips, and each answer still comes well within a deadline."""

_KEY_HEX = re.compile(rb"[0-9a-f]{%d}" % (2 * HASH_BYTES))


class RedisStore:
    """A `SegmentStore`. Each call may take `deadline_s` per answer of Redis; connections are pooled and renewed."""

    def __init__(self, url: str, prefix: bytes, deadline_s: float, expire_s: int) -> None:
        self._client = connect(url, deadline_s)
        self._url = url
        self._prefix = prefix
        self._expire_s = expire_s or None

    def get(self, key: bytes) -> bytes | None:
        """GET."""
        sealed: bytes | None = self._ask(lambda: self._client.get(self._name(key)))
        return sealed

    def put(self, key: bytes, sealed: Any) -> None:
        """SET, with the expiry. The buffer goes to the socket without a copy."""
        value = memoryview(sealed).cast("B")
        self._ask(lambda: self._client.set(self._name(key), value, ex=self._expire_s))

    def delete(self, keys: Sequence[bytes]) -> int:
        """UNLINK: Redis frees the memory beside its other work."""
        deleted = 0
        for start in range(0, len(keys), BATCH):
            names = [self._name(key) for key in keys[start : start + BATCH]]
            deleted += int(self._ask(lambda names=names: self._client.unlink(*names)))  # type: ignore[misc]
        return deleted

    def headers(self) -> Iterator[list[StoredHeader]]:
        """SCAN, then STRLEN and GETRANGE of what it names."""
        seen: set[bytes] = set()  # SCAN may name a key twice
        cursor = -1
        while cursor != 0:
            cursor, names = self._ask(
                lambda: self._client.scan(max(cursor, 0), match=self._prefix + b"*", count=SCAN_COUNT)  # noqa: B023
            )
            suffixes = {name[len(self._prefix) :] for name in names} - seen
            seen |= suffixes
            keys = [bytes.fromhex(suffix.decode()) for suffix in suffixes if _KEY_HEX.fullmatch(suffix)]
            for start in range(0, len(keys), BATCH):
                yield self._read_headers(keys[start : start + BATCH])

    def delete_foreign(self) -> int:
        """Delete everything in this Redis that does not lie under the prefix: for a Redis that is ours alone."""
        deleted, cursor = 0, -1
        while cursor != 0:
            cursor, names = self._ask(lambda: self._client.scan(max(cursor, 0), count=SCAN_COUNT))  # noqa: B023
            if foreign := [name for name in names if not name.startswith(self._prefix)]:
                deleted += self._ask(lambda: self._client.unlink(*foreign))
        return deleted

    def _read_headers(self, keys: Sequence[bytes]) -> list[StoredHeader]:
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.strlen(self._name(key))
            pipeline.getrange(self._name(key), 0, HEADER_BYTES - 1)
        answers = self._ask(lambda: pipeline.execute(raise_on_error=False))
        found: list[StoredHeader] = []
        for key, length, head in zip(keys, answers[::2], answers[1::2], strict=True):
            for answer in (length, head):
                if isinstance(answer, redis.RedisError) and not _is_wrong_type(answer):
                    raise self._translate(answer) from answer
            if isinstance(length, redis.RedisError) or isinstance(head, redis.RedisError):
                found.append(StoredHeader(key, b"", -1))
            elif length:  # 0: it has gone since the scan
                found.append(StoredHeader(key, head, length))
        return found

    def _name(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode()

    def _ask(self, command: Callable[[], Any]) -> Any:
        try:
            return command()
        except redis.RedisError as error:
            raise self._translate(error) from error

    def _translate(self, error: redis.RedisError) -> Exception:
        if _is_wrong_type(error):
            return StoreWrongTypeError(str(error))
        if isinstance(error, redis.exceptions.OutOfMemoryError) or str(error).startswith("MISCONF"):
            return StoreFullError(str(error))
        if isinstance(error, redis.exceptions.TimeoutError):
            return StoreTimeoutError(explain(self._url, error))
        return StoreUnavailableError(explain(self._url, error))


def _is_wrong_type(error: redis.RedisError) -> bool:
    return str(error).startswith("WRONGTYPE")
