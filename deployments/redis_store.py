"""Segments as Redis hashes: the transport, which knows keys and commands, and of a segment only its length.

A segment lies under `prefix` + its key in hexadecimal, which people can read in redis-cli. Entries below the prefix
whose name is no such key are not ours and are not touched.

It is one hash: field `h` is the header, fields `0`, `1`, ... are the payload in parts of `PART_BYTES`, the last one
shorter. So no value is large, and yet a segment is one key, which is deleted, expires and is listed as a whole.

* The header is written last: an entry without one is half-written, and not found.
* An entry with a header of which a part is missing, or has another length than the header says, comes back as far as it
  goes; `CheckedStore` says why it is refused. Nothing is allocated for what a header merely says.
"""

from __future__ import annotations

import contextlib
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
from kvmanager.segment_format import HEADER_BYTES, SegmentMismatch, read_header

PART_BYTES = 4 << 20
"""The largest value: reads of 8 MB are two to three times slower than those of 1 to 4 MB, and each part is sent and
answered within a deadline of its own."""
HEADER_FIELD = b"h"
"""A part's field is its number in decimal."""

SCAN_COUNT = 1000
BATCH = 500
"""Entries of one pipeline: few round trips, and each answer still comes well within a deadline."""

_KEY_HEX = re.compile(rb"[0-9a-f]{%d}" % (2 * HASH_BYTES))


class RedisStore:
    """A `SegmentStore`. Each call may take `deadline_s` per answer of Redis; connections are pooled and renewed."""

    def __init__(self, url: str, prefix: bytes, deadline_s: float, expire_s: int) -> None:
        self._client = connect(url, deadline_s)
        self._url = url
        self._prefix = prefix
        self._expire_ms = 1000 * expire_s

    def get(self, key: bytes) -> bytes | None:
        """HMGET of the header and the first part, and one for each further part."""
        head, part = self._read(key, 0)
        if head is None:
            return None
        payload_bytes = _payload_bytes(head)
        if payload_bytes is None:
            return head + (part or b"")
        pieces = [head]
        for number in range(_parts(payload_bytes)):
            if number:
                still_there, part = self._read(key, number)
                if still_there != head:  # deleted or replaced since
                    return None
            pieces.append(part or b"")
            if len(pieces[-1]) != min(PART_BYTES, payload_bytes - number * PART_BYTES):
                break
        return b"".join(pieces)

    def put(self, key: bytes, sealed: Any) -> None:
        """UNLINK, HSET of the parts from the last to the first and of the header, in one pipeline.

        The buffer goes to the socket without a copy. The entry expires from its first field on, so that what a dying
        writer leaves behind does too; what a failed one leaves is deleted, if Redis answers.
        """
        name, view = self._name(key), memoryview(sealed).cast("B")
        header, payload = view[:HEADER_BYTES], view[HEADER_BYTES:]
        parts = [payload[start : start + PART_BYTES] for start in range(0, len(payload), PART_BYTES)]
        fields = [(HEADER_FIELD, header), *((b"%d" % number, part) for number, part in enumerate(parts))]
        pipeline = self._client.pipeline(transaction=False)
        pipeline.unlink(name)  # HSET would leave another's fields, and refuses another type
        pipeline.hset(name, *fields.pop())
        if self._expire_ms:
            pipeline.pexpire(name, self._expire_ms)
        for field, value in reversed(fields):
            pipeline.hset(name, field, value)
        try:
            for answer in self._execute(pipeline):
                if isinstance(answer, redis.RedisError):
                    raise StoreUnavailableError(explain(self._url, answer)) from answer
        except Exception:
            with contextlib.suppress(redis.RedisError):
                self._client.unlink(name)
            raise

    def delete(self, keys: Sequence[bytes]) -> int:
        """UNLINK."""
        deleted = 0
        for start in range(0, len(keys), BATCH):
            names = [self._name(key) for key in keys[start : start + BATCH]]
            deleted += int(self._ask(lambda names=names: self._client.unlink(*names)))  # type: ignore[misc]
        return deleted

    def headers(self) -> Iterator[list[StoredHeader]]:
        """SCAN, then the header and the parts' lengths of what it names."""
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

    def _read(self, key: bytes, number: int) -> tuple[bytes | None, bytes | None]:
        """The header and one part, as they are now."""
        head, part = self._ask(lambda: self._client.hmget(self._name(key), [HEADER_FIELD, b"%d" % number]))
        return head, part

    def _read_headers(self, keys: Sequence[bytes]) -> list[StoredHeader]:
        pipeline = self._client.pipeline(transaction=False)
        for key in keys:
            pipeline.hlen(self._name(key))
            pipeline.hmget(self._name(key), [HEADER_FIELD])
            pipeline.hstrlen(self._name(key), "0")
        answers = self._execute(pipeline)
        found: dict[bytes, StoredHeader] = {}
        further: list[tuple[bytes, int]] = []
        for key, fields, heads, first_bytes in zip(keys, answers[::3], answers[1::3], answers[2::3], strict=True):
            if any(isinstance(answer, redis.RedisError) for answer in (fields, heads, first_bytes)):
                found[key] = StoredHeader(key, b"", -1)
            elif fields:  # 0: it has gone since the scan
                head = heads[0] or b""
                parts = _parts(_payload_bytes(head) or 0)
                if fields == 1 + parts:
                    found[key] = StoredHeader(key, head, len(head) + first_bytes)
                    further += [(key, number) for number in range(1, parts)]
                else:
                    found[key] = StoredHeader(key, head, -1)
        for start in range(0, len(further), BATCH):
            batch = further[start : start + BATCH]
            pipeline = self._client.pipeline(transaction=False)
            for key, number in batch:
                pipeline.hstrlen(self._name(key), str(number))
            for (key, _), part_bytes in zip(batch, self._execute(pipeline), strict=True):
                if not isinstance(part_bytes, redis.RedisError):  # else it has been replaced, and is too short
                    found[key] = found[key]._replace(total_bytes=found[key].total_bytes + part_bytes)
        return list(found.values())

    def _name(self, key: bytes) -> bytes:
        return self._prefix + key.hex().encode()

    def _execute(self, pipeline: Any) -> list[Any]:
        """The commands' answers; errors that concern one key only (another type lies there) are answers too."""
        answers: list[Any] = self._ask(lambda: pipeline.execute(raise_on_error=False))
        for answer in answers:
            if isinstance(answer, redis.RedisError) and not _is_wrong_type(answer):
                raise self._translate(answer) from answer
        return answers

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


def _parts(payload_bytes: int) -> int:
    """How many parts a payload has."""
    return -(-payload_bytes // PART_BYTES)


def _payload_bytes(head: bytes) -> int | None:
    """What a header says; None for what is no header."""
    try:
        return read_header(head).payload_bytes
    except SegmentMismatch:
        return None
