"""Segments larger than one value of Redis: they lie there in parts, and only all of the parts are the segment."""

from __future__ import annotations

import struct
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from redis_fixture import (
    FINGERPRINT,
    LARGE_SHAPE,
    MIB,
    SEGMENT_BLOCKS,
    RedisForTests,
    chain,
    endpoint,
    redis_name,
    sealed,
    until,
)

from deployments.segment_store import redis_store
from deployments.segment_store.base import StoreFullError, StoreUnavailableError
from deployments.segment_store.checked_store import CheckedStore
from deployments.segment_store.redis_store import PART_BYTES, RedisStore
from kvmanager.segments.format import HEADER_BYTES, MismatchReason, SegmentMismatch, body_offset, head_bytes
from kvmanager.segments.head import reseal_header
from kvmanager.segments.spans import SegmentSpan

SPAN, OTHER = chain(1, 2)
HEAD = head_bytes(SEGMENT_BLOCKS)
NAME = redis_name(SPAN.key)


def table_bytes(layers: int) -> int:
    return body_offset((layers, *LARGE_SHAPE[1:]), "float16", SEGMENT_BLOCKS) - HEAD


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisForTests]:
    found = RedisForTests(tmp_path_factory.mktemp("redis"), 256 * MIB)
    yield found
    found.stop()


@pytest.fixture
def transport(running: RedisForTests) -> RedisStore:
    running.empty()
    return RedisStore(running.url, endpoint("").prefix, 5.0, 1000)


@pytest.fixture
def store(transport: RedisStore) -> CheckedStore:
    return CheckedStore(transport, FINGERPRINT)


def large(span: SegmentSpan) -> Any:
    return sealed(span, shape=LARGE_SHAPE)


def is_listed(store: CheckedStore) -> bool:
    """Whether the only entry is usable, by what a scan sees."""
    (chunk,) = store.scan()
    assert len(chunk.headers) + len(chunk.unusable) == 1
    return bool(chunk.headers)


def lengths(running: RedisForTests) -> dict[bytes, int]:
    return {field: running.client.hstrlen(NAME, field) for field in running.client.hkeys(NAME)}  # type: ignore[arg-type]


def test_a_large_segment_is_one_key_of_small_values_and_comes_back(running: RedisForTests, store: CheckedStore) -> None:
    store.put(SPAN.key, large(SPAN))
    assert running.client.keys() == [NAME]
    assert lengths(running) == {b"h": HEAD, b"0": PART_BYTES, b"1": PART_BYTES, b"2": 2 * MIB + table_bytes(10)}
    assert PART_BYTES <= 4 * MIB
    assert store.get(SPAN.key) == large(SPAN).tobytes()
    assert 990 <= running.client.ttl(NAME) <= 1000
    assert store.delete([SPAN.key]) == 1
    assert running.client.dbsize() == 0


@pytest.mark.parametrize(
    ("shape", "parts", "last_bytes"),
    [
        ((1, *LARGE_SHAPE[1:]), 1, MIB + table_bytes(1)),
        ((1, 2, 16, 1, 65534), 1, PART_BYTES),
        ((4, *LARGE_SHAPE[1:]), 2, table_bytes(4)),
        ((2, 2, 8, 1, 131068), 2, PART_BYTES),
    ],
)
def test_the_last_part_may_be_a_whole_one(
    running: RedisForTests, store: CheckedStore, shape: tuple[int, int, int, int, int], parts: int, last_bytes: int
) -> None:
    segment = sealed(SPAN, shape=shape)
    store.put(SPAN.key, segment)
    assert len(lengths(running)) == 1 + parts
    assert lengths(running)[b"%d" % (parts - 1)] == last_bytes
    assert store.get(SPAN.key) == segment.tobytes()
    assert is_listed(store)


def test_a_smaller_segment_leaves_no_part_of_the_larger_one_before_it(
    running: RedisForTests, store: CheckedStore
) -> None:
    store.put(SPAN.key, large(SPAN))
    store.put(SPAN.key, sealed(SPAN))
    assert set(lengths(running)) == {b"h", b"0"}
    assert store.get(SPAN.key) == sealed(SPAN).tobytes()


def test_a_large_segment_goes_to_the_socket_without_a_copy(store: CheckedStore) -> None:
    segment = large(SPAN)
    store.put(SPAN.key, sealed(SPAN))  # connects
    tracemalloc.start()
    try:
        store.put(SPAN.key, segment)
        assert tracemalloc.get_traced_memory()[1] < MIB
    finally:
        tracemalloc.stop()


def test_the_index_counts_the_bytes_of_all_parts(
    transport: RedisStore, store: CheckedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_store, "PART_BYTES", 1000)  # 17 parts each, more than one pipeline takes
    spans = chain(2, 60)
    for span in spans:
        CheckedStore(transport, FINGERPRINT).put(span.key, sealed(span))
    entries = [entry for chunk in transport.headers() for entry in chunk]
    assert {entry.key: entry.total_bytes for entry in entries} == {span.key: sealed(span).nbytes for span in spans}
    assert sum(len(chunk.headers) for chunk in store.scan()) == len(spans)


# Not wholly there.


def swap(client: Any) -> None:
    first, second = client.hmget(NAME, "0", "1")
    client.hset(NAME, mapping={"0": second, "1": first})


def announce(client: Any, layers: int) -> None:
    """A valid header, of a payload that is not there."""
    header = bytearray(client.hget(NAME, "h"))
    struct.pack_into("<I", header, 16, layers)
    struct.pack_into("<Q", header, 48, layers * MIB + table_bytes(layers))
    reseal_header(header)
    client.hset(NAME, "h", bytes(header))


def damage_hash(client: Any) -> None:
    head = bytearray(client.hget(NAME, "h"))
    head[HEADER_BYTES + 5] ^= 1
    client.hset(NAME, "h", bytes(head))


TRUNCATED, CHECKSUM, LENGTH = MismatchReason.TRUNCATED, MismatchReason.CHECKSUM, MismatchReason.LENGTH
DAMAGES: dict[str, tuple[Callable[[Any], Any], MismatchReason, bool]] = {
    "no first part": (lambda client: client.hdel(NAME, "0"), TRUNCATED, False),
    "no middle part": (lambda client: client.hdel(NAME, "1"), TRUNCATED, False),
    "no last part": (lambda client: client.hdel(NAME, "2"), TRUNCATED, False),
    "only the header": (lambda client: client.hdel(NAME, "0", "1", "2"), TRUNCATED, False),
    "a shorter part": (lambda client: client.hset(NAME, "1", b"x" * (PART_BYTES - 1)), TRUNCATED, False),
    "a longer part": (lambda client: client.hset(NAME, "2", b"x" * (2 * MIB + table_bytes(10) + 1)), LENGTH, False),
    "swapped parts": (swap, CHECKSUM, True),
    "another segment's part": (
        lambda client: client.hset(NAME, "1", large(OTHER)[-PART_BYTES:].tobytes()),
        CHECKSUM,
        True,
    ),
    "a header of more than there is": (lambda client: announce(client, 13), TRUNCATED, False),
    "a header of more than any memory": (lambda client: announce(client, 2**32 - 1), TRUNCATED, False),
    "a header of less than there is": (lambda client: announce(client, 8), LENGTH, False),
    "a damaged block hash": (damage_hash, MismatchReason.HEADER, False),
    "a head that is too short": (
        lambda client: client.hset(NAME, "h", client.hget(NAME, "h")[:-32]),
        MismatchReason.HEADER,
        False,
    ),
    "a head of another length": (
        lambda client: client.hset(NAME, "h", client.hget(NAME, "h") + bytes(32)),
        TRUNCATED,
        False,
    ),
    "a head longer than any": (lambda client: client.hset(NAME, "h", bytes(1 << 20)), MismatchReason.MAGIC, False),
    "a damaged header": (lambda client: client.hset(NAME, "h", b"x" * HEADER_BYTES), MismatchReason.MAGIC, False),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_not_all_of_its_parts_is_a_mismatch(running: RedisForTests, store: CheckedStore, damage: str) -> None:
    harm, reason, looks_well = DAMAGES[damage]
    store.put(SPAN.key, large(SPAN))
    harm(running.client)
    with pytest.raises(SegmentMismatch) as raised:
        store.get(SPAN.key)
    assert raised.value.reason == reason
    assert is_listed(store) == looks_well


@pytest.mark.parametrize("missing", [["h"], ["h", "0"], ["h", "0", "1"]])
def test_parts_without_a_header_are_missing_and_of_no_use(
    running: RedisForTests, store: CheckedStore, missing: list[str]
) -> None:
    store.put(SPAN.key, large(SPAN))
    running.client.hdel(NAME, *missing)
    assert store.get(SPAN.key) is None
    assert not is_listed(store)


def test_a_segment_that_goes_or_is_replaced_while_it_is_read_is_missing(
    running: RedisForTests, transport: RedisStore, store: CheckedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = transport._read

    def read_and(then: Callable[[], Any]) -> Callable[[bytes, int], Any]:
        def reading(key: bytes, number: int) -> Any:
            found = read(key, number)
            then()
            return found

        return reading

    for then in (lambda: running.client.delete(NAME), lambda: running.client.hset(NAME, "h", b"another")):
        store.put(SPAN.key, large(SPAN))
        monkeypatch.setattr(transport, "_read", read_and(then))
        assert store.get(SPAN.key) is None


# Not wholly written.


def test_a_put_that_redis_has_no_room_for_leaves_nothing(running: RedisForTests, store: CheckedStore) -> None:
    limit = running.client.config_get("maxmemory")["maxmemory"]

    def refused() -> bool:
        """Where Redis frees what an ended connection had while it takes the segment, there was room: once more."""
        running.client.config_set("maxmemory", limit)
        running.client.unlink(NAME)
        store.put(SPAN.key, sealed(SPAN))  # is replaced, or gone
        until(lambda: not running.client.info("memory")["lazyfree_pending_objects"], "deleted segments are freed")
        used = running.client.info("memory")["used_memory"]
        running.client.config_set("maxmemory", used + MIB)  # for the first part
        try:
            store.put(SPAN.key, large(SPAN))
        except StoreFullError:
            return True
        return False

    try:
        until(refused, "Redis has no room")
        assert running.client.dbsize() == 0
    finally:
        running.client.config_set("maxmemory", limit)
    store.put(SPAN.key, large(SPAN))
    assert store.get(SPAN.key) == large(SPAN).tobytes()


def test_a_put_whose_last_command_is_refused_leaves_nothing(
    running: RedisForTests, transport: RedisStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = transport._execute

    def spoil_the_last(pipeline: Any) -> Any:
        command, _ = pipeline.command_stack.pop()
        pipeline.rpush(*command[1:])  # of the wrong type
        return execute(pipeline)

    monkeypatch.setattr(transport, "_execute", spoil_the_last)
    with pytest.raises(StoreUnavailableError):
        CheckedStore(transport, FINGERPRINT).put(SPAN.key, large(SPAN))
    assert running.client.dbsize() == 0


@pytest.mark.parametrize("commands", range(3, 6))
def test_what_a_dying_writer_leaves_is_not_found_and_expires(
    running: RedisForTests, transport: RedisStore, monkeypatch: pytest.MonkeyPatch, commands: int
) -> None:
    execute = transport._execute

    def die_early(pipeline: Any) -> Any:
        assert len(pipeline.command_stack) == 6
        del pipeline.command_stack[commands:]
        return execute(pipeline)

    with monkeypatch.context() as patched:
        patched.setattr(transport, "_execute", die_early)
        CheckedStore(transport, FINGERPRINT).put(SPAN.key, large(SPAN))
    assert transport.get(SPAN.key) is None
    assert 990 <= running.client.ttl(NAME) <= 1000
    assert not is_listed(CheckedStore(transport, FINGERPRINT))
