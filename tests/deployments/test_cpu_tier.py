"""The CPU tier with a real Ray: who owns the bytes, what is refused, and what outlives whom."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest
from kv_cluster import SEGMENT_BYTES, KVCluster, sealed, sequence, until

from deployments import cpu_tier
from deployments.cpu_tier import CPUTier
from deployments.manager_client import ManagerUnavailableError
from kvmanager.segments import SegmentSpan

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def cluster(ray_cluster: Any) -> Iterator[KVCluster]:
    running = KVCluster()
    yield running
    running.close()


def test_what_was_put_is_read_without_a_copy_and_cannot_be_changed(cluster: KVCluster, ray_cluster: Any) -> None:
    hashes, spans = sequence(1, 3)
    assert cluster.save(spans) == 3
    assert cluster.planned(hashes) == [span.key for span in spans]

    refs = cluster.ask_tier("fetch", [span.key for span in spans])
    first, again = ray_cluster.get(refs), ray_cluster.get(refs)

    for read, repeated, expected in zip(first, again, sealed(spans), strict=True):
        assert np.array_equal(read, expected)
        assert not read.flags.writeable
        assert read.ctypes.data == repeated.ctypes.data, "both are views of the store's memory"


def test_an_unknown_segment_is_fetched_as_none(cluster: KVCluster) -> None:
    _, spans = sequence(2, 1)
    assert cluster.ask_tier("fetch", [spans[0].key]) == [None]


def test_what_nobody_reserved_is_dropped_again(cluster: KVCluster) -> None:
    hashes, spans = sequence(3, 2)
    before = cluster.ask_tier("stats")

    assert cluster.ask_tier("put", spans, *sealed(spans)) == 0

    assert cluster.ask_tier("stats") == before
    assert cluster.ask_tier("fetch", [spans[0].key]) == [None]
    assert cluster.planned(hashes) == []


def test_the_tiers_count_is_the_managers_count_also_after_evictions(cluster: KVCluster) -> None:
    for seed in range(10, 20):  # twice what there is room for
        hashes, spans = sequence(seed, 4)
        cluster.planned(hashes)
        assert cluster.save(spans) == 4

    own, books = cluster.ask_tier("stats"), cluster.ask("stats")["locations"][0]
    assert own["refused"] == 0
    assert (own["segments"], own["used_bytes"]) == (books["segments"], books["bytes"])
    assert own["used_bytes"] == cluster.budget_bytes


def test_a_new_manager_learns_what_the_tier_holds(cluster: KVCluster, ray_cluster: Any) -> None:
    hashes, spans = sequence(30, 3)
    cluster.ask("clear", ["cpu"], 5.0)
    cluster.save(spans)

    ray_cluster.kill(cluster.manager)
    cluster.start_manager()
    cluster.wait_for_tier()

    assert cluster.planned(hashes) == [span.key for span in spans]


def test_a_killed_tier_comes_back_empty_and_is_planned_from_no_more(cluster: KVCluster, ray_cluster: Any) -> None:
    hashes, spans = sequence(40, 3)
    cluster.save(spans)
    assert cluster.planned(hashes)

    ray_cluster.kill(cluster.tier, no_restart=False)

    until(lambda: cluster.planned(hashes) == [], "the manager has forgotten the lost segments")
    assert cluster.ask_tier("fetch", [span.key for span in spans]) == [None] * 3
    assert cluster.save(spans) == 3
    assert cluster.planned(hashes) == [span.key for span in spans]


# The tier's own rules, in this process, under a manager that says what the test wants.


class Manager:
    """Wants every segment, unless `unavailable`."""

    def __init__(self) -> None:
        self.unavailable = False

    async def ask(self, method: str, *args: Any, timeout_s: float) -> Any:
        if self.unavailable:
            raise ManagerUnavailableError("gone")
        return [span.key for span in args[1]] if method == "commit" else (True, None)


@pytest.fixture
def in_process(ray_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Runs a test's coroutine with a tier of two segments' room and its manager."""
    manager = Manager()
    monkeypatch.setattr(cpu_tier, "ManagerClient", lambda app_name: manager)

    def run(test: Callable[[CPUTier, Manager, list[SegmentSpan]], Awaitable[None]]) -> None:
        async def main() -> None:
            tier = CPUTier("app", "node", 2 * SEGMENT_BYTES, 0)
            await test(tier, manager, sequence(50, 3)[1])
            tier._heartbeat.cancel()

        asyncio.run(main())

    return run


def test_what_exceeds_the_budget_is_refused_by_the_tier_itself(in_process: Any) -> None:
    async def check(tier: CPUTier, manager: Manager, spans: list[SegmentSpan]) -> None:
        assert await tier.put(spans, *sealed(spans)) == 2
        stats = await tier.stats()
        assert (stats["segments"], stats["refused"]) == (2, 1)
        assert stats["used_bytes"] == stats["budget_bytes"] == 2 * SEGMENT_BYTES

    in_process(check)


def test_an_eviction_gives_its_bytes_back_once(in_process: Any) -> None:
    async def check(tier: CPUTier, manager: Manager, spans: list[SegmentSpan]) -> None:
        await tier.put(spans[:2], *sealed(spans[:2]))
        assert await tier.evict([spans[1].key]) == SEGMENT_BYTES
        assert await tier.evict([spans[1].key]) == 0
        assert (await tier.stats())["used_bytes"] == SEGMENT_BYTES
        assert await tier.put(spans[2:], *sealed(spans[2:])) == 1

    in_process(check)


def test_a_segment_put_twice_is_held_and_counted_once(in_process: Any) -> None:
    async def check(tier: CPUTier, manager: Manager, spans: list[SegmentSpan]) -> None:
        await tier.put(spans[:1], *sealed(spans[:1]))
        await tier.put(spans[:1], *sealed(spans[:1]))
        assert (await tier.stats())["used_bytes"] == SEGMENT_BYTES

    in_process(check)


def test_without_a_manager_nothing_new_is_kept(in_process: Any) -> None:
    async def check(tier: CPUTier, manager: Manager, spans: list[SegmentSpan]) -> None:
        await tier.put(spans[:1], *sealed(spans[:1]))
        manager.unavailable = True
        assert await tier.put(spans[1:2], *sealed(spans[1:2])) == 0
        assert (await tier.stats())["segments"] == 1

    in_process(check)


def test_what_was_dropped_before_its_commit_is_not_committed(in_process: Any) -> None:
    async def check(tier: CPUTier, manager: Manager, spans: list[SegmentSpan]) -> None:
        await tier.put(spans[:2], *sealed(spans[:2]))
        await tier.evict([spans[0].key])
        assert await tier._commit(spans[:2]) == 1
        assert await tier._commit(spans[:1]) == 0

    in_process(check)
