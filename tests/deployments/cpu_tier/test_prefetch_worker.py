"""Prefetch workers in a real Ray with a real Redis: what they answer when all is well, and when nothing is."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from own_clock import OwnClock
from redis_fixture import (
    FINGERPRINT,
    SECRET,
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

from deployments.cpu_tier import prefetch_worker
from deployments.cpu_tier.prefetch_worker import PrefetchWorker, start_worker
from deployments.segment_store.segment_codecs import Coding
from kvmanager.segments.format import SegmentHeader, read_header, seal, verify
from kvmanager.segments.guard import SegmentGuard
from kvmanager.segments.spans import SegmentSpan
from load_tests.harness.memory_port import made_up_hashes
from load_tests.harness.patience import patience

pytestmark = pytest.mark.server

LARGE = (4, 2, 4 * 32, 4, 64)
"""512 KB: more than Ray keeps outside its shared memory."""
PATIENCE_S = 60.0


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisForTests]:
    found = RedisForTests(tmp_path_factory.mktemp("redis"))
    yield found
    found.stop()


@pytest.fixture(autouse=True)
def _empty(running: RedisForTests) -> None:
    running.empty()


@pytest.fixture
def worker(running: RedisForTests) -> PrefetchWorker:
    """One in this process."""
    return PrefetchWorker(endpoint(running.url))


@pytest.fixture(scope="module")
def node(ray_cluster: Any) -> str:
    return str(ray_cluster.get_runtime_context().get_node_id())


@pytest.fixture
def actor(running: RedisForTests, ray_cluster: Any, node: str) -> Iterator[Any]:
    started = start_worker("app", node, 0, endpoint(running.url, deadline_s=PATIENCE_S))
    yield started
    ray_cluster.kill(started)


def write(worker: PrefetchWorker, spans: list[SegmentSpan]) -> tuple[int, str]:
    """How many were stored, and why not more."""
    sizes, reason, _ = worker.write([span.key for span in spans], *(sealed(span) for span in spans))
    assert set(sizes) <= {sealed(spans[0]).nbytes}
    return len(sizes), reason


def test_a_read_answers_what_was_written(worker: PrefetchWorker) -> None:
    spans = chain(1, 3)
    assert write(worker, spans) == (3, "")
    for span in spans:
        assert np.array_equal(worker.read(span.key), sealed(span))


def test_every_failure_of_a_read_has_its_reason(running: RedisForTests, worker: PrefetchWorker) -> None:
    missing, listed, swapped, damaged, short = chain(2, 5)
    running.client.rpush(redis_name(listed.key), "a list")
    running.client.hset(redis_name(swapped.key), mapping=fields_of(guarded(sealed(missing).tobytes())))
    running.client.hset(redis_name(short.key), mapping=fields_of(b"short"))
    fill(running.client, [damaged])
    running.client.hset(
        redis_name(damaged.key), "0", bytes(sealed(damaged).nbytes - read_header(sealed(damaged).data).head_bytes)
    )
    assert worker.read(missing.key) == "missing"
    assert worker.read(listed.key) == "wrong_type"
    assert worker.read(swapped.key) == "mismatch_key"
    assert worker.read(short.key) == "mismatch_truncated"
    assert worker.read(damaged.key) == "mismatch_keyed_checksum"
    running.client.flushall()
    assert worker.read(damaged.key) == "missing"


def test_a_full_redis_ends_a_write_where_it_is_full(running: RedisForTests, worker: PrefetchWorker) -> None:
    spans = chain(3, 3)
    limit = running.client.config_get("maxmemory")["maxmemory"]
    running.client.config_set("maxmemory", 1)
    try:
        assert write(worker, spans) == (0, "full")
    finally:
        running.client.config_set("maxmemory", limit)
    assert write(worker, spans) == (3, "")


def test_a_write_stops_at_its_first_failure(running: RedisForTests, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = PrefetchWorker(endpoint(running.url))
    put, spans = worker._store.put, chain(4, 3)

    def put_until_redis_dies(key: bytes, buffer: Any) -> int:
        if key == spans[1].key:
            running.stop()
        return put(key, buffer)

    monkeypatch.setattr(worker._store, "put", put_until_redis_dies)
    try:
        assert write(worker, spans) == (1, "unreachable")
    finally:
        running.start()
    assert [bool(running.client.exists(redis_name(span.key))) for span in spans] == [True, False, False]


def test_what_is_no_segment_ends_a_write(running: RedisForTests, worker: PrefetchWorker) -> None:
    spans = chain(12, 3)
    buffers = [sealed(span) for span in spans]
    buffers[1][100] ^= 1
    assert worker.write([span.key for span in spans], *buffers) == ([buffers[0].nbytes], "damaged", {})
    assert [bool(running.client.exists(redis_name(span.key))) for span in spans] == [True, False, False]


def test_nobody_there_is_unreachable(own_records: Any) -> None:
    worker = PrefetchWorker(endpoint("unix:///nonexistent/socket"))
    span = chain(5, 1)[0]
    assert worker.read(span.key) == "unreachable"
    assert worker.read(span.key) == "unreachable"
    assert write(worker, [span]) == (0, "unreachable")
    assert len(own_records()) == 1, "an outage is logged once"


def test_what_queued_up_behind_a_timeout_does_not_wait_again(
    running: RedisForTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = OwnClock()
    monkeypatch.setattr(prefetch_worker, "time", clock)
    worker = PrefetchWorker(endpoint(running.url, deadline_s=0.3))
    spans = chain(6, 3)
    asked: list[bytes] = []
    transport: Any = worker._store._store._inner
    get = transport.get
    transport.get = lambda key: asked.append(key) or get(key)
    os.kill(running.server.pid or 0, signal.SIGSTOP)
    try:
        assert [worker.read(span.key) for span in spans] == ["unreachable"] * 3
    finally:
        os.kill(running.server.pid or 0, signal.SIGCONT)
    assert asked == [spans[0].key]

    def works() -> bool:
        clock.sleep(0.3)
        return worker.read(spans[0].key) == "missing"

    until(works, "it works again by itself")


def test_a_worker_reads_over_one_connection(worker: PrefetchWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, most, lock = [0], [0], threading.Lock()

    def get(key: bytes) -> None:
        with lock:
            reading[0] += 1
            most[0] = max(most[0], reading[0])
        time.sleep(0.02)
        with lock:
            reading[0] -= 1

    monkeypatch.setattr(worker._store, "fetch", get)
    threads = [threading.Thread(target=worker.read, args=(b"k" * 32,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1]


# With the real codecs.


@pytest.mark.parametrize(
    ("coding", "fidelity", "codec", "least_ratio"),
    [
        (Coding("lossless", "cachegen", 2), "exact", "lossless", 1.3),
        (Coding("lossless", "cachegen", 2), "tolerant", "cachegen", 3.0),
        (Coding("raw", "cachegen", 2), "exact", "raw", 1.0),
    ],
)
def test_segments_are_coded_in_redis_and_raw_when_they_come_back(
    running: RedisForTests, coding: Coding, fidelity: str, codec: str, least_ratio: float
) -> None:
    worker = PrefetchWorker(endpoint(running.url, coding=coding))
    span = chain(13, 1)[0]
    segment = normal_segment(span, fidelity)
    (stored,), reason, _ = worker.write([span.key], segment)
    assert reason == ""
    guarded_header: Any = running.client.hget(redis_name(span.key), "h")
    header = read_header(SegmentGuard(SECRET).open_header(guarded_header))
    assert (header.codec, header.fidelity, header.sealed_bytes) == (codec, fidelity, stored)
    assert segment.nbytes / stored >= least_ratio
    other = PrefetchWorker(endpoint(running.url))  # which stores raw, and must find out how to read this
    found = other.read(span.key)
    assert isinstance(found, np.ndarray)
    if fidelity == "exact":
        assert np.array_equal(found, segment)
    else:
        error = (values(found) - values(segment)).abs().mean() / values(segment).abs().mean()
        assert 0 < error < 0.3
        assert verify(found.data, key=span.key, fingerprint=FINGERPRINT).codec == "raw"
    report = worker.codec_report()
    assert report.keys() == {coding.exact, coding.tolerant}, "those that it writes with, used or not"
    assert {name for name, count in report.items() if count["raw_bytes"]} == {codec}


def normal_segment(span: SegmentSpan, fidelity: str) -> Any:
    shape = (2, 2, 4 * 32, 2, 64)
    header = SegmentHeader.raw(span, made_up_hashes(span), FINGERPRINT, shape, "bfloat16", fidelity)
    buffer = np.zeros(header.sealed_bytes, np.uint8)
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    buffer[header.body_offset :] = drawn.view(torch.uint8).numpy().reshape(-1)
    seal(buffer.data, header)
    return buffer


def values(segment: Any) -> torch.Tensor:
    return torch.from_numpy(segment[read_header(segment.data).body_offset :].copy()).view(torch.bfloat16).float()


# In a real Ray.


def test_what_is_read_lies_in_the_object_store(actor: Any, ray_cluster: Any) -> None:
    span = chain(8, 1)[0]
    segment = sealed(span, shape=LARGE)
    ref = ray_cluster.put(segment)
    assert ray_cluster.get(actor.write.remote([span.key], ref), timeout=patience(PATIENCE_S)) == (
        [segment.nbytes],
        "",
        {},
    )
    read = actor.read.remote(span.key)
    first, again = (ray_cluster.get(read, timeout=patience(PATIENCE_S)) for _ in range(2))
    assert np.array_equal(first, sealed(span, shape=LARGE))
    assert first.ctypes.data == again.ctypes.data, "both are views of the store's memory"
    assert not first.flags.writeable


def test_a_reason_is_an_answer_and_no_error(actor: Any, ray_cluster: Any) -> None:
    assert ray_cluster.get(actor.read.remote(b"n" * 32), timeout=patience(PATIENCE_S)) == "missing"


def test_reads_pass_by_a_write_that_waits(actor: Any, running: RedisForTests, ray_cluster: Any) -> None:
    span, other = chain(9, 2)
    fill(running.client, [span])

    class Slow:
        """An argument that the worker's write thread cannot finish with before the test lets it."""

        def __init__(self, folder: str, content: bytes) -> None:
            self.folder = folder
            self.content = content

        @property
        def data(self) -> memoryview:
            from pathlib import Path
            from time import sleep

            Path(self.folder, "begun").touch()
            while not Path(self.folder, "go").exists():
                sleep(0.01)
            return memoryview(self.content)

    folder = running.server._folder.path
    writing = actor.write.remote([other.key], Slow(str(folder), sealed(other).tobytes()))
    until((folder / "begun").exists, "the write has begun")
    try:
        assert np.array_equal(ray_cluster.get(actor.read.remote(span.key), timeout=patience(PATIENCE_S)), sealed(span))
    finally:
        (folder / "go").touch()
    assert ray_cluster.get(writing, timeout=patience(PATIENCE_S)) == ([sealed(other).nbytes], "", {})


def test_a_killed_worker_fails_what_it_was_asked_at_once(actor: Any, running: RedisForTests, ray_cluster: Any) -> None:
    os.kill(running.server.pid or 0, signal.SIGSTOP)  # so that the call is under way when the worker dies
    try:
        reading = actor.read.remote(chain(10, 1)[0].key)
        ray_cluster.kill(actor)
        with pytest.raises(ray_cluster.exceptions.RayActorError):
            ray_cluster.get(reading, timeout=patience(PATIENCE_S))
    finally:
        os.kill(running.server.pid or 0, signal.SIGCONT)


def test_a_worker_ends_with_the_actor_that_started_it(running: RedisForTests, ray_cluster: Any, node: str) -> None:
    class Owner:
        def start(self, node_id: str, where: Any) -> Any:
            self.worker = start_worker("app", node_id, 0, where)
            return self.worker

    owner = ray_cluster.remote(num_cpus=0)(Owner).remote()
    worker = ray_cluster.get(owner.start.remote(node, endpoint(running.url)), timeout=patience(PATIENCE_S))
    assert ray_cluster.get(worker.read.remote(b"n" * 32), timeout=patience(PATIENCE_S)) == "missing"
    ray_cluster.kill(owner)

    def ended() -> bool:
        try:
            ray_cluster.get(worker.read.remote(b"n" * 32), timeout=patience(PATIENCE_S))
        except ray_cluster.exceptions.RayActorError:
            return True
        return False

    until(ended, "the worker has ended")


def test_several_threads_share_one_worker(worker: PrefetchWorker) -> None:
    spans = chain(11, 40)
    assert write(worker, spans) == (40, "")
    wrong: list[bytes] = []

    def read(part: list[SegmentSpan]) -> None:
        wrong.extend(span.key for span in part * 5 if not np.array_equal(worker.read(span.key), sealed(span)))

    threads = [threading.Thread(target=read, args=(spans[number::4],)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
