"""Segments in Redis: what is not exactly what was stored does not come back, whatever happened to it there."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import pytest
from redis_fixture import (
    FINGERPRINT,
    OTHER_FINGERPRINT,
    RedisForTests,
    chain,
    endpoint,
    fields_of,
    fill,
    guarded,
    redis_name,
    sealed,
    until,
)

from deployments.segment_store.base import StoreFullError, StoreTimeoutError, StoreUnavailableError, StoreWrongTypeError
from deployments.segment_store.checked_store import CheckedStore
from deployments.segment_store.endpoint import open_store
from deployments.segment_store.redis_store import RedisStore
from kvmanager.segments.format import SegmentMismatch
from kvmanager.segments.server_secret import ServerSecret
from kvmanager.segments.spans import SegmentSpan


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisForTests]:
    found = RedisForTests(tmp_path_factory.mktemp("redis"))
    yield found
    found.stop()


@pytest.fixture
def store(running: RedisForTests) -> CheckedStore:
    running.empty()
    return open_store(endpoint(running.url))


def listed(store: CheckedStore) -> tuple[set[bytes], set[bytes]]:
    """Keys of usable and of unusable entries."""
    chunks = list(store.scan())
    return (
        {header.key for chunk in chunks for header in chunk.headers},
        {key for chunk in chunks for key in chunk.unusable},
    )


def test_what_was_put_comes_back_and_is_gone_when_deleted(store: CheckedStore) -> None:
    spans = chain(1, 3)
    for span in spans:
        store.put(span.key, sealed(span))
    assert [store.get(span.key) for span in spans] == [sealed(span).tobytes() for span in spans]
    assert store.delete([spans[0].key, spans[2].key, b"n" * 32]) == 2
    assert [store.get(span.key) is None for span in spans] == [True, False, True]


def test_the_headers_tell_where_each_segment_lies_in_its_sequence(store: CheckedStore) -> None:
    spans = chain(2, 5)
    for span in spans:
        store.put(span.key, sealed(span))
    headers = [header for chunk in store.scan() for header in chunk.headers]
    assert sorted((header.span for header in headers), key=lambda span: span.start_block) == spans
    assert {header.sealed_bytes for header in headers} == {sealed(spans[0]).nbytes}


def test_more_segments_than_one_scan_and_one_pipeline_take_are_all_listed_once(
    running: RedisForTests, store: CheckedStore
) -> None:
    spans = chain(3, 1700)
    fill(running.client, spans)
    keys = [header.key for chunk in store.scan() for header in chunk.headers]
    assert sorted(keys) == sorted(span.key for span in spans)
    assert store.delete(keys) == 1700


def test_what_a_scan_names_twice_is_listed_once(running: RedisForTests, monkeypatch: pytest.MonkeyPatch) -> None:
    running.empty()
    span = chain(16, 1)[0]
    fill(running.client, [span])
    transport = RedisStore(running.url, endpoint("").prefix, 5.0, 0)
    answers = iter([(7, [redis_name(span.key)]), (0, [redis_name(span.key)])])
    monkeypatch.setattr(transport._client, "scan", lambda *args, **kwargs: next(answers))
    assert [len(chunk) for chunk in transport.headers()] == [1]


def test_segments_expire_when_they_are_told_to(running: RedisForTests, store: CheckedStore) -> None:
    span = chain(4, 1)[0]
    store.put(span.key, sealed(span))
    assert 990 <= running.client.ttl(redis_name(span.key)) <= 1000
    open_store(endpoint(running.url, expire_s=0)).put(span.key, sealed(span))
    assert running.client.ttl(redis_name(span.key)) == -1


def test_what_is_renewed_expires_as_late_as_what_is_written_now(running: RedisForTests, store: CheckedStore) -> None:
    spans = chain(18, 3)
    for span in spans:
        store.put(span.key, sealed(span))
        running.client.expire(redis_name(span.key), 5)
    RedisStore(running.url, endpoint("").prefix, 5.0, 1000).renew([span.key for span in spans])
    assert min(running.client.pttl(redis_name(span.key)) for span in spans) > 990_000
    RedisStore(running.url, endpoint("").prefix, 5.0, 0).renew([spans[0].key])
    assert running.client.pttl(redis_name(spans[0].key)) > 990_000, "where nothing expires nothing is set"


def test_two_namespaces_and_two_models_do_not_see_each_other(running: RedisForTests, store: CheckedStore) -> None:
    span = chain(5, 1)[0]
    others = [
        open_store(endpoint(running.url, namespace="tests2")),
        open_store(endpoint(running.url, fingerprint=OTHER_FINGERPRINT)),
    ]
    store.put(span.key, sealed(span))
    for other in others:
        assert other.get(span.key) is None
        assert listed(other) == (set(), set())
        assert other.delete([span.key]) == 0
    assert listed(store) == ({span.key}, set())


def test_names_that_are_no_keys_are_left_alone(running: RedisForTests, store: CheckedStore) -> None:
    running.client.set(endpoint("").prefix + b"note", b"somebody's")
    running.client.set(redis_name(b"\xab" * 32).upper(), b"somebody's")
    assert listed(store) == (set(), set())


def flip(sealed_bytes: bytes, offset: int) -> bytes:
    return sealed_bytes[:offset] + bytes([sealed_bytes[offset] ^ 1]) + sealed_bytes[offset + 1 :]


def in_redis(span: SegmentSpan, fingerprint: bytes = FINGERPRINT) -> bytes:
    return guarded(sealed(span, fingerprint).tobytes())


DAMAGES: list[tuple[str, Callable[[SegmentSpan, SegmentSpan], bytes], bool]] = [
    ("a flipped bit of the header", lambda span, other: flip(in_redis(span), 60), True),
    ("a flipped bit of the payload", lambda span, other: flip(in_redis(span), 9999), False),
    ("truncated", lambda span, other: in_redis(span)[:-1], True),
    ("truncated in the header", lambda span, other: in_redis(span)[:100], True),
    ("prolonged", lambda span, other: in_redis(span) + b"\0", True),
    ("another segment", lambda span, other: in_redis(other), True),
    ("another model's", lambda span, other: in_redis(span, OTHER_FINGERPRINT), True),
    ("under another secret", lambda span, other: guarded(sealed(span).tobytes(), ServerSecret(bytes(32))), True),
    ("not guarded", lambda span, other: sealed(span).tobytes(), True),
    ("rubbish", lambda span, other: b"x" * 20_000, True),
]


@pytest.mark.parametrize(("damage", "shows_in_header"), [d[1:] for d in DAMAGES], ids=[d[0] for d in DAMAGES])
def test_a_damaged_segment_is_a_mismatch(
    running: RedisForTests,
    store: CheckedStore,
    damage: Callable[[SegmentSpan, SegmentSpan], bytes],
    shows_in_header: bool,
) -> None:
    span, other = chain(6, 2)
    running.client.hset(redis_name(span.key), mapping=fields_of(damage(span, other)))
    with pytest.raises(SegmentMismatch):
        store.get(span.key)
    assert listed(store) == ((set(), {span.key}) if shows_in_header else ({span.key}, set()))


@pytest.mark.parametrize("kind", ["list", "string"])
def test_a_value_of_another_type_is_unusable(running: RedisForTests, store: CheckedStore, kind: str) -> None:
    span = chain(7, 1)[0]
    if kind == "list":
        running.client.rpush(redis_name(span.key), "a list")
    else:
        running.client.set(redis_name(span.key), sealed(span).tobytes())
    with pytest.raises(StoreWrongTypeError):
        store.get(span.key)
    assert listed(store) == (set(), {span.key})
    assert store.delete([span.key]) == 1
    store.put(span.key, sealed(span))
    assert listed(store) == ({span.key}, set())


def test_a_full_redis_says_so_and_goes_on_when_there_is_room(running: RedisForTests, store: CheckedStore) -> None:
    span = chain(8, 1)[0]
    limit = running.client.config_get("maxmemory")["maxmemory"]
    running.client.config_set("maxmemory", 1)
    try:
        with pytest.raises(StoreFullError):
            store.put(span.key, sealed(span))
        assert store.get(span.key) is None
    finally:
        running.client.config_set("maxmemory", limit)
    store.put(span.key, sealed(span))
    assert store.get(span.key)


def test_an_emptied_redis_has_nothing(running: RedisForTests, store: CheckedStore) -> None:
    span = chain(9, 1)[0]
    store.put(span.key, sealed(span))
    running.client.flushall()
    assert store.get(span.key) is None
    assert listed(store) == (set(), set())


def test_a_stopped_redis_is_unavailable_and_usable_again_when_it_runs(running: RedisForTests) -> None:
    running.empty()
    span = chain(10, 1)[0]
    hasty = open_store(endpoint(running.url, deadline_s=0.1))
    hasty.put(span.key, sealed(span))
    os.kill(running.server.pid or 0, signal.SIGSTOP)
    try:
        for call in (
            lambda: hasty.get(span.key),
            lambda: hasty.put(span.key, sealed(span)),
            lambda: hasty.delete([span.key]),
            lambda: list(hasty.scan()),
        ):
            with pytest.raises(StoreTimeoutError, match="does not answer in time"):
                call()
    finally:
        os.kill(running.server.pid or 0, signal.SIGCONT)

    def answers() -> bool:
        try:
            return hasty.put(span.key, sealed(span)) is None
        except StoreUnavailableError:
            return False

    until(answers, "the store works again")
    assert hasty.get(span.key) == sealed(span).tobytes()


def test_a_restarted_redis_is_found_again_by_the_same_store(running: RedisForTests) -> None:
    running.empty()
    span = chain(11, 1)[0]
    store = open_store(endpoint(running.url))
    store.put(span.key, sealed(span))
    os.kill(running.server.pid or 0, signal.SIGKILL)
    until(lambda: not running.server.running, "the server is dead")
    with pytest.raises(StoreUnavailableError, match="no Redis can be reached"):
        store.get(span.key)
    running.start()
    assert store.get(span.key) == sealed(span).tobytes()
