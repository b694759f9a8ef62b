"""The CPU tier with a real Ray: who owns the bytes, what is refused, and what outlives whom."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from kv_cluster import SIZES, KVCluster, offered, sealed, sequence, until
from ray import cloudpickle

from configs.kv_section import KVSettings
from deployments.cpu_tier import actor as cpu_tier
from deployments.cpu_tier.actor import CPUTier, tier_name
from deployments.port.cluster_port import ClusterPort
from deployments.protocol.manager_client import SERVE_NAMESPACE, ManagerClient
from load_tests.harness.memory_port import made_up_hashes

pytestmark = pytest.mark.server
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import a test


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


def test_a_stored_segment_says_what_its_blocks_are_called(cluster: KVCluster) -> None:
    _, spans = sequence(4, 2)
    assert cluster.save(spans) == 2
    named = cluster.ask_tier("block_hashes", [spans[1].key, b"unknown", spans[0].key])
    assert named == [made_up_hashes(spans[1]), b"", made_up_hashes(spans[0])]


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

    own, books = cluster.ask_tier("stats"), cluster.ask("api", "stats")["locations"][0]
    assert own["refused"] == 0
    assert (own["segments"], own["used_bytes"]) == (books["segments"], books["bytes"])
    assert own["used_bytes"] == cluster.budget_bytes


def test_a_new_manager_learns_what_the_tier_holds(cluster: KVCluster, ray_cluster: Any) -> None:
    hashes, spans = sequence(30, 3)
    cluster.ask("api", "clear", ["cpu"], 5.0)
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


class MortalTier(CPUTier):
    """Waits for a manager no longer once it is told so."""

    async def lose_patience(self) -> None:
        self._times = replace(self._times, orphan_s=0.0)


@pytest.fixture
def mortal(ray_cluster: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[KVCluster, ClusterPort]]:
    """A cluster whose tier is a `MortalTier`, and the port of its replica."""
    monkeypatch.setattr(cpu_tier, "CPUTier", MortalTier)
    cluster = KVCluster()
    settings = KVSettings(cpu_tier_bytes=cluster.budget_bytes, lease_s=10.0)
    port = ClusterPort(cluster.app, "replica", cluster.node, settings, ManagerClient(cluster.app))
    yield cluster, port
    port.close()
    cluster.tier = port._own_tier
    cluster.close()


def test_a_tier_that_ended_while_there_was_no_manager_is_started_again(mortal: Any, ray_cluster: Any) -> None:
    cluster, port = mortal
    ray_cluster.kill(cluster.manager)
    cluster.ask_tier("lose_patience")

    def ended() -> bool:
        try:
            ray_cluster.get_actor(tier_name(cluster.app, cluster.node), namespace=SERVE_NAMESPACE)
        except ValueError:
            return True
        return False

    until(ended, "the tier has ended")
    cluster.start_manager()
    cluster.register_replica()
    hashes, spans = sequence(60, 2)
    assert port.offer(offered(spans), SIZES) is None, "the node has no tier"

    port.look_after_tier()
    cluster.wait_for_tier()

    grant = port.offer(offered(spans), SIZES)
    assert port.store(grant, list(zip(spans, sealed(spans), strict=True))) == 2
    assert cluster.planned(hashes) == [span.key for span in spans]
    assert port.counters["tier_started_again"] == 1


# The tier's own rules, in this process, under a manager that says what the test wants.
