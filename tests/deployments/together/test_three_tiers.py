"""The port, CPU tier, prefetch workers, Redis tier and manager together: real Ray, a real redis-server, no engine."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
from kv_cluster import SEGMENT_BYTES, KVCluster, sealed, sequence, until
from redis_fixture import SECRET

from configs.kv_section import KVSettings
from deployments.cpu_tier.prefetch_pool import STUCK_S
from deployments.port import tier_reader
from deployments.port.cluster_port import ClusterPort
from deployments.protocol.manager_client import ManagerClient, ManagerUnavailableError
from deployments.redis_tier.actor import RedisTier, RedisTierConfig, RedisTimes
from deployments.redis_tier.server import EmbeddedRedis
from deployments.segment_store.redis_connection import connect
from deployments.segment_store.segment_codecs import Coding
from kvmanager.moves.plan import PlanQuery
from kvmanager.segments.keys import BlockHash
from load_tests.harness.patience import patience

pytestmark = pytest.mark.server

DEADLINE_S = 20.0
REDIS_DEADLINE_S = 4.0
TIMES = RedisTimes(heartbeat_s=0.1, first_heartbeat_s=0.1, probe_every_s=0.1, retry_s=0.1, longest_retry_s=0.5)


def spread_loads_over(tier: Any, workers: int | None) -> None:
    """Let a CPU tier's every load use this number of its workers; None: as many as the pool chooses.

    Those that a test stops are not replaced meanwhile, however late the port is to notice.
    """

    def act(tier: Any, wanted: int | None) -> None:
        from deployments.cpu_tier import prefetch_pool
        from kvmanager.loading.fan_out import workers_for

        prefetch_pool.workers_for = (
            workers_for if wanted is None else lambda _, pieces, ready: min(wanted, pieces, ready)
        )
        prefetch_pool.STUCK_S = STUCK_S if wanted is None else 10 * DEADLINE_S

    ray.get(tier.__ray_call__.remote(act, workers), timeout=patience(DEADLINE_S))


class ThreeTiers(KVCluster):
    """A cluster with a Redis of its own, and a replica's port on it."""

    def __init__(self, folder: Path) -> None:
        super().__init__(segments=40, with_redis=True, prefetch_workers=2, lease_s=2 * DEADLINE_S)
        self.redis_server = EmbeddedRedis(folder, 64 * 1024**2)
        self.redis_server.start()
        self.redis = connect(self.redis_server.url, 10.0)
        config = RedisTierConfig(
            app_name=self.app,
            url=self.redis_server.url,
            folder="",
            namespace="test",
            budget_bytes=100 * SEGMENT_BYTES,
            expire_s=0,
            deadline_s=REDIS_DEADLINE_S,
            coding=Coding("lossless", "cachegen", 2),
        )
        self.redis_tier = ray.remote(RedisTier).options(num_cpus=0).remote(config, SECRET, TIMES)
        self.wait_for_redis()
        settings = KVSettings(
            cpu_tier_bytes=self.budget_bytes,
            redis_url=self.redis_server.url,
            load_deadline_s=4 * DEADLINE_S,
        )
        self.port = ClusterPort(self.app, "replica", self.node, settings, ManagerClient(self.app))

    def wait_for_redis(self) -> None:
        until(lambda: self._redis_is_usable(), "Redis is indexed and the workers are there")

    def _redis_is_usable(self) -> bool:
        self.stats()  # keeps the replica from being forgotten
        report = self.ask("api", "parts")["redis"]
        return report["state"] == "ok" and not report["indexing"] and self.ask_tier("stats")["workers"] == 2

    def store(self, seed: int, segments: int = 4) -> list[BlockHash]:
        """A prompt whose segments lie in both shared tiers."""
        hashes, spans = sequence(seed, segments)
        self.planned(hashes)
        assert self.save(spans) == segments
        until(lambda: self.ask("api", "lookup", hashes)["redis"] == len(hashes), "all of it is in Redis")
        return hashes

    def only_in_redis(self, seed: int, segments: int = 4) -> list[BlockHash]:
        hashes = self.store(seed, segments)
        self.ask("api", "clear", ["cpu"], 5.0)
        return hashes

    def load(self, hashes: list[BlockHash]) -> list[bytes | None]:
        """Plan and fetch as a replica does."""
        self.register_replica()
        plan = self.ask("plan", "replica", self.node, PlanQuery(hashes))
        found = [
            view and bytes(view) for view in self.port.fetch(plan.segments, time.monotonic() + patience(DEADLINE_S))
        ]
        self.port.release(plan.lease_id)
        return found

    def worker_pids(self) -> list[int]:
        """Of this tier's prefetch workers that can be asked; other tests' servers may have some too."""
        workers = ray.get(self.tier.__ray_call__.remote(lambda tier: tier._redis.ready_workers()))
        return ray.get([worker.__ray_call__.remote(lambda _: os.getpid()) for worker in workers])

    def close(self) -> None:
        self.port.close()
        ray.kill(self.redis_tier)
        super().close()
        self.redis_server.stop()


@pytest.fixture(scope="module")
def tiers(ray_cluster: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ThreeTiers]:
    running = ThreeTiers(tmp_path_factory.mktemp("redis"))
    yield running
    running.close()


@pytest.fixture(autouse=True)
def _well(tiers: ThreeTiers, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Each test begins with tiers that are well, and counters at zero. No worker is late, however slow it is."""
    monkeypatch.setattr(tier_reader, "LATE_S", DEADLINE_S)
    tiers.wait_for_redis()
    tiers.port.counters.clear()
    yield
    until(lambda: tiers.stats()["leases"] == tiers.stats()["reservations"] == 0, "nothing is held any more")
    until(lambda: tiers.ask_tier("stats")["pulls_in_flight"] == 0, "no segment is on its way")


def expected(seed: int, segments: int = 4) -> list[bytes]:
    return [buffer.tobytes() for buffer in sealed(sequence(seed, segments)[1])]


def test_what_left_the_cpu_tier_comes_from_redis_byte_for_byte_and_stays(tiers: ThreeTiers) -> None:
    hashes = tiers.only_in_redis(1)
    assert tiers.ask("api", "lookup", hashes)["cpu"] == 0

    assert tiers.load(hashes) == expected(1)

    until(lambda: tiers.ask("api", "lookup", hashes)["cpu"] == len(hashes), "it is in the CPU tier again")
    assert not tiers.port.counters
    own = tiers.ask_tier("stats")
    (books,) = [location for location in tiers.ask("api", "stats")["locations"] if location["tier"] == "cpu"]
    assert (own["segments"], own["used_bytes"]) == (books["segments"], books["bytes"])


def test_segments_are_smaller_in_redis_and_the_books_say_so(tiers: ThreeTiers) -> None:
    hashes = tiers.only_in_redis(20)
    tiers.register_replica()
    plan = tiers.ask("plan", "replica", tiers.node, PlanQuery(hashes))
    tiers.ask("release", [plan.lease_id])
    for load in plan.segments:
        (name,) = tiers.redis.keys(f"*{load.key.hex()}")
        stored = sum(tiers.redis.hstrlen(name, field) for field in tiers.redis.hkeys(name))
        assert load.nbytes == stored < load.raw_nbytes == SEGMENT_BYTES
    codecs = tiers.ask_tier("stats")["codecs"]
    assert codecs.keys() == {"lossless", "cachegen"}
    assert codecs["cachegen"]["raw_bytes"] == 0  # no prompt here is tolerant
    assert codecs["lossless"]["coded_bytes"] < codecs["lossless"]["raw_bytes"]


def test_two_loads_of_one_prompt_fetch_it_once(tiers: ThreeTiers) -> None:
    hashes = tiers.only_in_redis(2)
    keys = [(span.key, SEGMENT_BYTES) for span in sequence(2, 4)[1]]
    before = int(tiers.redis.info("commandstats")["cmdstat_hmget"]["calls"])

    both = [tiers.tier.prefetch.remote("replica", keys) for _ in range(2)]
    first, second = ray.get(both)

    assert [bytes(each) for each in ray.get(first)] == expected(2)
    assert [bytes(each) for each in ray.get(second)] == expected(2)
    assert int(tiers.redis.info("commandstats")["cmdstat_hmget"]["calls"]) - before <= len(keys)
    until(lambda: tiers.ask("api", "lookup", hashes)["cpu"] == len(hashes), "it is in the CPU tier again")


def test_a_segment_that_redis_has_lost_ends_the_load_and_leaves_the_index(tiers: ThreeTiers) -> None:
    hashes = tiers.only_in_redis(3)
    third = sequence(3, 4)[1][2].key
    assert tiers.redis.delete(*tiers.redis.keys(f"*{third.hex()}")) == 1

    assert tiers.load(hashes) == [*expected(3)[:2], None]

    assert tiers.port.counters == {"redis_missing": 1}
    until(lambda: tiers.ask("api", "lookup", hashes)["redis"] == 8, "what hangs on it is not planned either")


def test_a_damaged_segment_is_refused_by_the_worker_and_deleted(tiers: ThreeTiers) -> None:
    hashes = tiers.only_in_redis(4)
    (name,) = tiers.redis.keys(f"*{sequence(4, 4)[1][1].key.hex()}")
    tiers.redis.hset(name, "0", bytes(tiers.redis.hstrlen(name, "0")))

    assert tiers.load(hashes) == [expected(4)[0], None]

    assert tiers.port.counters == {"redis_mismatch_keyed_checksum": 1}
    until(lambda: not tiers.redis.exists(name), "the damaged segment is deleted")


def test_a_redis_that_hangs_costs_its_deadline_and_is_then_not_asked(tiers: ThreeTiers) -> None:
    hashes = tiers.only_in_redis(5)
    pid = tiers.redis.info("server")["process_id"]
    os.kill(pid, signal.SIGSTOP)
    try:
        assert tiers.load(hashes) == [None]
        assert set(tiers.port.counters) == {"redis_unreachable"}
        until(lambda: tiers.ask("api", "parts")["redis"]["state"] != "ok", "the Redis tier has noticed")
        assert tiers.load(hashes) == [], "nothing is planned from there any more"
    finally:
        os.kill(pid, signal.SIGCONT)
    tiers.wait_for_redis()
    until(lambda: tiers.load(hashes) == expected(5), "it is found again")


def test_killed_workers_cost_the_load_and_are_started_again(tiers: ThreeTiers) -> None:
    hashes = tiers.only_in_redis(6)
    workers = tiers.worker_pids()
    for worker in workers:
        os.kill(worker, signal.SIGSTOP)  # so that the segments are on their way when the workers die
    refs = ray.get(tiers.tier.prefetch.remote("replica", [(s.key, SEGMENT_BYTES) for s in sequence(6, 4)[1]]))
    for worker in workers:
        os.kill(worker, signal.SIGKILL)

    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(refs[0], timeout=patience(60))

    tiers.wait_for_redis()
    until(lambda: tiers.load(hashes) == expected(6), "new workers fetch it")


@pytest.fixture
def two_at_work(tiers: ThreeTiers) -> Iterator[None]:
    """Loads use both workers, however small they are."""
    spread_loads_over(tiers.tier, 2)
    yield
    spread_loads_over(tiers.tier, None)


@pytest.mark.usefixtures("two_at_work")
def test_what_a_dead_worker_was_asked_for_comes_from_the_other_one(tiers: ThreeTiers) -> None:
    hashes = tiers.only_in_redis(11, segments=6)
    dead = tiers.worker_pids()[0]
    os.kill(dead, signal.SIGSTOP)  # so that the segments are on their way when it dies
    loaded: list[Any] = []
    loading = threading.Thread(target=lambda: loaded.extend(tiers.load(hashes)))
    loading.start()
    until(lambda: tiers.ask_tier("stats")["pulls_in_flight"], "the load is under way")
    os.kill(dead, signal.SIGKILL)
    loading.join()

    assert loaded == expected(11, 6)
    assert tiers.port.counters == {"redis_asked_again": 1}


@pytest.mark.usefixtures("two_at_work")
def test_what_a_late_worker_was_asked_for_comes_from_the_other_one(
    tiers: ThreeTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier_reader, "LATE_S", patience(1.0))
    hashes = tiers.only_in_redis(12, segments=6)
    late_before = tiers.ask_tier("stats")["late_pulls"]
    late = tiers.worker_pids()[0]
    os.kill(late, signal.SIGSTOP)
    try:
        assert tiers.load(hashes) == expected(12, 6)
    finally:
        os.kill(late, signal.SIGCONT)

    assert tiers.port.counters == {"redis_asked_again": 1}
    assert tiers.ask_tier("stats")["late_pulls"] - late_before == 3, "all that it had"


@pytest.mark.usefixtures("two_at_work")
def test_a_load_beyond_the_deadline_of_all_workers_ends_there(
    tiers: ThreeTiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes = tiers.only_in_redis(13)
    monkeypatch.setitem(tiers.port._reader._longest_wait_s, "redis", 0.3)  # type: ignore[arg-type]
    pids = tiers.worker_pids()
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        assert tiers.load(hashes) == [None]
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)
    assert tiers.port.counters == {"redis_late": 1}, "nobody else could have done better"


@pytest.fixture
def asked(tiers: ThreeTiers, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many segments each of a load's windows asks a tier for; a window has two.

    The tier may pull more: what it is to keep must have its chain there.
    """
    windows: list[int] = []
    ask = tiers.port._reader._ask

    def noted(place: Any, loads: Any) -> Any:
        windows.append(len(loads))
        return ask(place, loads)

    monkeypatch.setattr(tier_reader, "WINDOW_BYTES", 2 * SEGMENT_BYTES)
    monkeypatch.setattr(tiers.port._reader, "_ask", noted)
    return windows


def test_a_long_prefix_is_asked_for_bit_by_bit(tiers: ThreeTiers, asked: list[int]) -> None:
    hashes = tiers.only_in_redis(14, segments=8)
    assert tiers.load(hashes) == expected(14, 8)
    assert asked == [2, 2, 2, 2]
    assert not tiers.port.counters


def test_a_read_that_ends_early_has_not_asked_for_what_lies_far_ahead(tiers: ThreeTiers, asked: list[int]) -> None:
    hashes = tiers.only_in_redis(15, segments=8)
    assert tiers.redis.delete(*tiers.redis.keys(f"*{sequence(15, 8)[1][1].key.hex()}")) == 1
    assert tiers.load(hashes) == [expected(15, 8)[0], None]
    assert asked == [2, 2], "the first two of four windows"
    until(lambda: tiers.ask("api", "lookup", hashes)["redis"] == 4, "what hangs on the lost one is not planned")


def test_a_shrunk_budget_keeps_heads_of_chains_and_the_books_agree(tiers: ThreeTiers) -> None:
    tiers.ask("api", "clear", ["cpu"], 5.0)
    hashes = tiers.store(7)

    def agree(budget_bytes: int) -> bool:
        own = tiers.ask_tier("stats")
        (books,) = [location for location in tiers.ask("api", "stats")["locations"] if location["tier"] == "cpu"]
        tiers.register_replica()
        same = (own["segments"], own["used_bytes"]) == (books["segments"], books["bytes"])
        return same and own["budget_bytes"] == books["budget_bytes"] == budget_bytes >= own["used_bytes"] > 0

    ray.get(tiers.tier.resize.remote(2 * SEGMENT_BYTES))
    try:
        until(lambda: agree(2 * SEGMENT_BYTES), "the tier has registered with its new budget")
        assert tiers.load(hashes) == expected(7), "the rest comes from Redis"
    finally:
        ray.get(tiers.tier.resize.remote(tiers.budget_bytes))
    until(lambda: agree(tiers.budget_bytes), "the tier has its old budget")


def test_a_redis_that_is_full_keeps_what_it_has_and_takes_more_when_it_has_room(tiers: ThreeTiers) -> None:
    kept = tiers.store(8)
    tiers.redis.config_set("maxmemory", "1mb")
    hashes, spans = sequence(9, 3)
    tiers.planned(hashes)
    tiers.save(spans)
    until(lambda: tiers.stats()["demotions"] == 0, "the copy was given up")
    assert tiers.ask("api", "lookup", hashes)["redis"] == 0
    assert tiers.ask("api", "lookup", kept)["redis"] == len(kept)

    tiers.redis.config_set("maxmemory", "0")

    def used_again() -> bool:
        tiers.planned(hashes)  # each use earns another try
        return int(tiers.ask("api", "lookup", hashes)["redis"]) == len(hashes)

    until(used_again, "it is copied after all")


def test_a_new_manager_finds_everything_again(tiers: ThreeTiers) -> None:
    hashes = tiers.only_in_redis(10)

    ray.kill(tiers.manager)
    tiers.start_manager()
    tiers.register_replica()
    tiers.wait_for_tier()
    tiers.wait_for_redis()

    def found() -> bool:
        try:
            tiers.port.manager.ask_blocking("api", "parts", timeout_s=patience(DEADLINE_S))
        except ManagerUnavailableError:
            return False
        return True

    until(found, "the port has found the new manager: what it told the dead one would be lost, a lease's end too")
    assert tiers.load(hashes) == expected(10)
