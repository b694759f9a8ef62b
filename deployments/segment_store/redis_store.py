"""Segments as Redis hashes: the transport, which knows keys and commands, and of a segment only its length.

A segment lies under `prefix` + its key in hexadecimal, which people can read in redis-cli. Entries below the prefix
whose name is no such key are not ours and are not touched.

It is one hash: field `h` is the head, header and block hashes; fields `0`, `1`, ... are the body in parts of
`PART_BYTES`, the last one shorter. So no value is large, and yet a segment is one key, which is deleted, expires and is
listed as a whole.

* The head is written last: an entry without one is half-written, and not found.
* An entry with a head of which a part is missing, or has another length than the header says, comes back up to there;
  `CheckedStore` says why it is refused. Nothing is allocated for what a header merely says.
"""

from __future__ import annotations

import contextlib
import re
import struct
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import redis

from deployments.segment_store.base import (
    StoredHeader,
    StoreFullError,
    StoreTimeoutError,
    StoreUnavailableError,
    StoreWrongTypeError,
)
from deployments.segment_store.redis_connection import SCAN_COUNT, connect, explain
from kvmanager.segments.format import Buffer, SegmentMismatch, stated_body_bytes, stated_head_bytes
from kvmanager.segments.keys import HASH_BYTES
from kvmanager.segments.sizes import MOST_SEGMENT_BLOCKS, MOST_SEGMENT_BYTES, head_bytes

PART_BYTES = 4 << 20
"""The largest value: reads of 8 MB are two to three times slower than those of 1 to 4 MB, and each part is sent and
answered within a deadline of its own."""
MOST_HEAD_BYTES = head_bytes(MOST_SEGMENT_BLOCKS)
HEADER_FIELD = b"h"
"""A part's field is its number in decimal."""

BATCH = 500
"""Entries of one pipeline: few round trips, and each answer still comes well within a deadline."""

_HEADERS = """
local found = {}
for number, name in ipairs(KEYS) do
    local fields, head, part_bytes = redis.pcall('HLEN', name), '', 0
    if type(fields) ~= 'number' then
        fields = -1
    else
        if redis.call('HSTRLEN', name, 'h') <= tonumber(ARGV[1]) then
            head = redis.call('HMGET', name, 'h')[1] or ''
        end
        for part = 0, math.min(fields - 2, 4096) do
            part_bytes = part_bytes + redis.call('HSTRLEN', name, part)
        end
    end
    found[number] = struct.pack('<i4i8i4', fields, part_bytes, #head) .. head
end
return table.concat(found)
"""
"""Per key: number of fields (-1: no hash), bytes of the numbered ones, and the head if it is no longer than one. One
command for a batch: as three commands for each key, 100,000 keys cost redis-py seconds."""
_ENTRY = struct.Struct("<iqi")

_KEY_HEX = re.compile(rb"[0-9a-f]{%d}" % (2 * HASH_BYTES))


class RedisStore:
    """A `SegmentStore`. Each call may take `deadline_s` per answer of Redis; connections are pooled and renewed."""

    def __init__(self, url: str, prefix: bytes, deadline_s: float, expire_s: int) -> None:
        self._client = connect(url, deadline_s)
        self._url = url
        self._prefix = prefix
        self._expire_ms = 1000 * expire_s

    def get(self, key: bytes) -> bytearray | None:
        """HMGET of the header and the first part, and one for each further part."""
        head, part = self._read(key, 0)
        if head is None:
            return None
        body_bytes = _stated_bytes(head)
        if body_bytes is None:
            return bytearray(head + (part or b""))
        pieces = [head]
        for number in range(_parts(body_bytes)):
            if number:
                still_there, part = self._read(key, number)
                if still_there != head:  # deleted or replaced since
                    return None
            pieces.append(part or b"")
            if len(pieces[-1]) != min(PART_BYTES, body_bytes - number * PART_BYTES):
                break
        return bytearray().join(pieces)

    def put(self, key: bytes, header: Buffer, body: Buffer) -> None:
        """UNLINK, HSET of the parts from the last to the first and of the header, in one pipeline.

        The buffers go to the socket without a copy. The entry expires from its first field on, so that what a dying
        writer leaves behind does too; what a failed one leaves is deleted, if Redis answers.
        """
        name, view = self._name(key), memoryview(body).cast("B")
        parts = [view[start : start + PART_BYTES] for start in range(0, len(view), PART_BYTES)]
        fields = [(HEADER_FIELD, memoryview(header)), *((b"%d" % number, part) for number, part in enumerate(parts))]
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

    def renew(self, keys: Sequence[bytes]) -> list[bytes]:
        """PEXPIRE, one after the other in this order; returns what is not there. Raises StoreUnavailableError."""
        missing: list[bytes] = []
        for start in range(0, len(keys) if self._expire_ms else 0, BATCH):
            pipeline = self._client.pipeline(transaction=False)
            chunk = keys[start : start + BATCH]
            for key in chunk:
                pipeline.pexpire(self._name(key), self._expire_ms)
            missing += [key for key, there in zip(chunk, self._execute(pipeline), strict=True) if not there]
        return missing

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

    def _read(self, key: bytes, number: int) -> tuple[bytes | None, bytes | None]:
        """The header and one part, as they are now."""
        head, part = self._ask(lambda: self._client.hmget(self._name(key), [HEADER_FIELD, b"%d" % number]))
        return head, part

    def _read_headers(self, keys: Sequence[bytes]) -> list[StoredHeader]:
        names = [self._name(key) for key in keys]
        answer: bytes = self._ask(lambda: self._client.eval(_HEADERS, len(names), *names, MOST_HEAD_BYTES))
        found, offset = [], 0
        for key in keys:
            fields, part_bytes, head_bytes = _ENTRY.unpack_from(answer, offset)
            offset += _ENTRY.size
            head = answer[offset : offset + head_bytes]
            offset += head_bytes
            if fields:  # 0: it has gone since the scan
                whole = fields == 1 + _parts(_stated_bytes(head) or 0)
                found.append(StoredHeader(key, head, head_bytes + part_bytes if whole else -1))
        return found

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


def _parts(body_bytes: int) -> int:
    """Return the number of parts of a body."""
    return -(-body_bytes // PART_BYTES)


def _stated_bytes(head: bytes) -> int | None:
    """What a head states of its body, unverified: the layers above verify; None for what is no segment's head."""
    try:
        if stated_head_bytes(head) != len(head):
            return None
    except SegmentMismatch:
        return None
    stated = stated_body_bytes(head)
    return stated if stated is not None and stated <= MOST_SEGMENT_BYTES else None
