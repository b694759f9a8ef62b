"""The connector's port over a real Ray: what it waits for, what it counts, and what it tells the manager."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import ray
from kv_cluster import SEGMENT_BLOCKS, SEGMENT_BYTES, SIZES, KVCluster, offered, sealed, sequence, until
from ray import cloudpickle

from configs.kv_section import KVSettings
from deployments.cpu_tier.actor import tier_name
from deployments.port import cluster_port as ray_port
from deployments.port.cluster_port import OFFER_DEADLINE_S, ClusterPort
from deployments.protocol.kv_port import OfferedBlocks
from deployments.protocol.manager_client import SERVE_NAMESPACE, ManagerClient, ManagerUnavailableError
from kvmanager.moves.plan import PlannedLoad, PlanQuery
from kvmanager.segments.spans import split_segments
from load_tests.harness.patience import patience

pytestmark = pytest.mark.server
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import a test

DEADLINE_S = 1.0
"""Of a tier that hangs."""
PATIENCE_S = 120.0
"""Of a tier and a manager that are well: they answer when the machine lets them."""
OTHER_NODE = "othernode"


@pytest.fixture(scope="module")
def cluster(ray_cluster: Any) -> Iterator[KVCluster]:
    running = KVCluster()
    yield running
    running.close()


def opened(cluster: KVCluster, tier_deadline_s: float) -> ClusterPort:
    cluster.register_replica()
    settings = KVSettings(
        cpu_tier_bytes=cluster.budget_bytes,
        load_deadline_s=4 * tier_deadline_s,
        lease_s=PATIENCE_S,
    )
    return ClusterPort(cluster.app, "replica", cluster.node, settings, ManagerClient(cluster.app))


@pytest.fixture
def port(cluster: KVCluster, monkeypatch: pytest.MonkeyPatch) -> Iterator[ClusterPort]:
    monkeypatch.setattr(ray_port, "OFFER_DEADLINE_S", PATIENCE_S)
    made = opened(cluster, PATIENCE_S)
    yield made
    made.close()


@pytest.fixture
def hasty_port(cluster: KVCluster) -> Iterator[ClusterPort]:
    """Waits for a tier as long as DEADLINE_S, and for the manager as the product does."""
    made = opened(cluster, DEADLINE_S)
    yield made
    made.close()


@pytest.fixture
def saved(cluster: KVCluster, port: ClusterPort, request: pytest.FixtureRequest) -> Any:
    """A prompt's hashes, spans and loads, saved through the port; another prompt in each test."""
    hashes, spans = sequence(len(request.node.name), 3)
    grant = port.offer(offered(spans), SIZES)
    assert grant is not None
    assert list(grant.spans) == spans
    port.store(grant, list(zip(spans, sealed(spans), strict=True)))
    return hashes, spans, [load(span.key, span.start_block, cluster.node) for span in spans]


def load(key: bytes, start_block: int, holder: str) -> PlannedLoad:
    return PlannedLoad(key, start_block, 4, "cpu", holder, SEGMENT_BYTES)


class OtherTier:
    """A tier on another node. Its answers come `delay_s` late; if `lost`, the owner of its one object is dead."""

    def __init__(self, delay_s: float, lost: bool) -> None:
        self._delay_s = delay_s
        owner = ray.remote(Owner).options(num_cpus=0).remote()
        self._refs = ray.get(owner.put.remote())
        if lost:
            ray.kill(owner)
            with contextlib.suppress(ray.exceptions.ObjectLostError):
                while True:  # until Ray has noticed
                    ray.get(self._refs)
                    time.sleep(0.05)

    def fetch(self, keys: list[bytes]) -> list[Any]:
        time.sleep(self._delay_s)
        return self._refs


class Owner:
    def put(self) -> list[Any]:
        return [ray.put(np.zeros(SEGMENT_BYTES, np.uint8))]


@pytest.fixture
def other_tier(cluster: KVCluster) -> Iterator[Any]:
    """Starts an `OtherTier` of the cluster's application."""
    started: list[Any] = []

    def start(delay_s: float = 0.0, lost: bool = False) -> None:
        options = {"name": tier_name(cluster.app, OTHER_NODE), "namespace": SERVE_NAMESPACE, "num_cpus": 0}
        started.append(ray.remote(OtherTier).options(**options).remote(delay_s, lost))
        ray.get(started[0].__ray_ready__.remote())

    yield start
    for tier in started:
        ray.kill(tier)


def told(port: ClusterPort, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the port tells the manager from now on."""
    calls: list[tuple[Any, ...]] = []

    def note(method: str, *arguments: Any) -> None:
        calls.extend([(name, *rest) for name, rest in arguments] if method == "batch" else [(method, *arguments)])

    monkeypatch.setattr(port.manager, "tell", note)
    return calls


def test_what_was_stored_is_planned_and_fetched(cluster: KVCluster, port: ClusterPort, saved: Any) -> None:
    hashes, spans, loads = saved
    assert cluster.planned(hashes) == [span.key for span in spans]

    fetched = [bytes(view or b"") for view in port.fetch(loads, time.monotonic() + patience(PATIENCE_S))]

    assert fetched == [buffer.tobytes() for buffer in sealed(spans)]
    assert not port.counters


def test_what_is_stored_already_is_not_granted_again(port: ClusterPort, saved: Any) -> None:
    _, spans, _ = saved
    grant = port.offer(offered(spans), SIZES)
    assert grant is not None
    assert grant.spans == ()


def test_a_segment_that_the_tier_lacks_ends_the_fetch_and_leaves_the_index(
    cluster: KVCluster, port: ClusterPort, saved: Any
) -> None:
    hashes, spans, loads = saved
    cluster.ask_tier("evict", [spans[1].key])

    fetched = list(port.fetch(loads, time.monotonic() + patience(PATIENCE_S)))

    assert [view is None for view in fetched] == [False, True]
    assert port.counters == {"fetch_missing": 1}
    until(lambda: cluster.planned(hashes) == [spans[0].key], "the manager plans what is still there")


def test_a_bad_segment_is_replaced_by_a_good_one(cluster: KVCluster, port: ClusterPort, saved: Any) -> None:
    hashes, spans, loads = saved
    port.report_bad(loads[2], "checksum")
    until(lambda: cluster.planned(hashes) == [span.key for span in spans[:2]], "the bad segment is planned no more")
    until(lambda: cluster.ask_tier("fetch", [spans[2].key]) == [None], "the tier has evicted it")

    grant = port.offer(offered(spans), SIZES)
    assert grant is not None
    port.store(grant, list(zip(spans[2:], sealed(spans[2:]), strict=True)))

    assert cluster.planned(hashes) == [span.key for span in spans]
    assert port.counters == {"mismatch_checksum": 1}


def test_a_tier_that_hangs_costs_no_more_than_the_deadline_and_loses_nothing(
    hasty_port: ClusterPort, other_tier: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    other_tier(delay_s=600)
    calls = told(hasty_port, monkeypatch)

    started = time.monotonic()
    fetched = list(hasty_port.fetch([load(b"k" * 32, 0, OTHER_NODE)], time.monotonic() + patience(600 * DEADLINE_S)))
    hasty_port.flush(patience(PATIENCE_S))

    assert fetched == [None]
    assert DEADLINE_S <= time.monotonic() - started < patience(30 * DEADLINE_S)
    assert hasty_port.counters == {"fetch_late": 1}
    assert [method for method, *_ in calls] == ["report_rates"], "late is not lost"


def test_a_lost_object_is_reported_lost(port: ClusterPort, other_tier: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    other_tier(lost=True)
    calls = told(port, monkeypatch)

    assert list(port.fetch([load(b"k" * 32, 0, OTHER_NODE)], time.monotonic() + patience(PATIENCE_S))) == [None]
    port.flush(patience(PATIENCE_S))

    assert port.counters == {"fetch_lost": 1}
    assert calls == [("lost", "cpu", OTHER_NODE, [b"k" * 32])]


def test_a_node_without_a_tier_is_no_error(port: ClusterPort) -> None:
    assert list(port.fetch([load(b"k" * 32, 0, "nowhere")], time.monotonic() + patience(PATIENCE_S))) == [None]
    assert port.counters == {"fetch_tier_gone": 1}


def test_leases_are_released_at_the_manager(cluster: KVCluster, port: ClusterPort, saved: Any) -> None:
    hashes, _, _ = saved
    leases = [cluster.ask("plan", "replica", cluster.node, PlanQuery(hashes)).lease_id for _ in range(3)]
    assert cluster.stats()["leases"] == 3

    for lease in [*leases, 0, leases[0]]:
        port.release(lease)

    until(lambda: cluster.stats()["leases"] == 0, "every lease has ended")


@contextlib.contextmanager
def standing_still(cluster: KVCluster) -> Iterator[None]:
    """The manager's process is stopped."""
    process = ray.get(cluster.manager.__ray_call__.remote(lambda _: os.getpid()), timeout=patience(PATIENCE_S))
    os.kill(process, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(process, signal.SIGCONT)


def test_what_the_manager_grants_too_late_is_given_back(
    cluster: KVCluster, hasty_port: ClusterPort, saved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashes, _, _ = saved
    _, others = sequence(400, 2)
    monkeypatch.setattr(ray_port, "OFFER_DEADLINE_S", DEADLINE_S)

    async def ask() -> None:
        await asyncio.to_thread(hasty_port.manager.find, patience(PATIENCE_S))
        before = (await asyncio.to_thread(cluster.stats))["counters"]
        with standing_still(cluster):
            assert await hasty_port.plan(PlanQuery(hashes)) is None
            assert hasty_port.offer(offered(others), SIZES) is None
        given_back = False
        while not given_back:
            stats = await asyncio.to_thread(cluster.stats)
            late = all(stats["counters"][asked] > before[asked] for asked in ("plans", "offered_segments"))
            given_back = late and stats["leases"] == stats["reservations"] == 0

    asyncio.run(asyncio.wait_for(ask(), patience(PATIENCE_S)))


def test_placement_reports_arrive_in_order(cluster: KVCluster, port: ClusterPort) -> None:
    hashes, _ = sequence(500, 3)
    port.report_placement(list(hashes), [], False)
    port.report_placement([], list(hashes), True)
    port.report_placement(list(hashes[:5]), [], False)
    until(lambda: cluster.ask("api", "lookup", hashes)["device"] == {"0": 5}, "the last report counts")


def test_what_the_tier_does_not_take_gives_its_room_back(cluster: KVCluster, port: ClusterPort) -> None:
    _, spans = sequence(600, 2)
    grant = port.offer(offered(spans), SIZES)
    assert grant is not None
    assert cluster.stats()["reservations"] == 1

    port.store(grant, [])

    until(lambda: cluster.stats()["reservations"] == 0, "the reservation is given back")
    assert port.counters == {"segments_not_stored": 2}


def test_without_a_manager_everything_is_nothing_and_quick(cluster: KVCluster, port: ClusterPort) -> None:
    _, spans = sequence(700, 2)
    ray.kill(cluster.manager)

    started = time.monotonic()
    assert port.offer(offered(spans), SIZES) is None
    port.release(5)
    port.report_placement([], [], True)
    port.flush()

    assert time.monotonic() - started < patience(10.0)
    assert port.counters["offer_unanswered"] == 1
    cluster.start_manager()
    cluster.wait_for_tier()
    cluster.register_replica()
    until(lambda: port.offer(offered(spans), SIZES) is not None, "the port has found the new manager")


class SilentManager:
    """A manager that answers nothing. Remembers how long it was waited for."""

    def __init__(self) -> None:
        self.waited_s: list[float] = []
        self.grants = False

    def ask_blocking(self, method: str, *args: Any, timeout_s: float, late: Any) -> Any:
        self.waited_s.append(timeout_s)
        if self.grants:
            blocks: OfferedBlocks = args[2]
            return 1, split_segments(blocks.hashes, 0, blocks.end_block, SEGMENT_BLOCKS, blocks.end_block)
        raise ManagerUnavailableError("silent")

    def tell_together(self, calls: Any) -> None:
        pass


def test_a_manager_that_hangs_is_waited_for_a_second_three_times_and_then_not_asked(hasty_port: ClusterPort) -> None:
    _, spans = sequence(800, 1)
    silent = hasty_port.manager = SilentManager()  # type: ignore[assignment]
    for _ in range(5):
        assert hasty_port.offer(offered(spans), SIZES) is None
    assert silent.waited_s == [OFFER_DEADLINE_S] * 3
    assert hasty_port.counters["offer_not_asked"] == 2
    assert hasty_port.circuits()["saves", ""] == "open"


def test_a_tier_that_fails_to_store_is_not_offered_anything_for_a_while(
    port: ClusterPort, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, spans = sequence(801, 1)
    silent = port.manager = SilentManager()  # type: ignore[assignment]
    silent.grants = True

    def late(*args: Any, **kwargs: Any) -> Any:
        raise ray.exceptions.GetTimeoutError("late")

    monkeypatch.setattr(ray_port.ray, "get", late)
    for _ in range(3):
        grant = port.offer(offered(spans), SIZES)
        assert grant is not None
        assert port.store(grant, list(zip(spans, sealed(spans), strict=True))) == 0
    assert port.offer(offered(spans), SIZES) is None
    assert len(silent.waited_s) == 3
    assert port.counters["store_failed"] == 3
