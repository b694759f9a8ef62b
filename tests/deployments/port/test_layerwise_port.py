"""Layers from a real CPU tier: group by group, and in place for as long as they are needed."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from kv_cluster import SEGMENT_BYTES, KVCluster, sealed, sequence

from configs.kv_section import KVSettings
from deployments.port.cluster_port import ClusterPort
from deployments.protocol.manager_client import ManagerClient
from kvmanager.moves.plan import PlannedLoad
from load_tests.harness.patience import patience

pytestmark = pytest.mark.server


@pytest.fixture(scope="module")
def cluster(ray_cluster: Any) -> Iterator[KVCluster]:
    running = KVCluster()
    yield running
    running.close()


@pytest.fixture
def port(cluster: KVCluster) -> Iterator[ClusterPort]:
    cluster.register_replica()
    settings = KVSettings(cpu_tier_bytes=cluster.budget_bytes, load_deadline_s=120.0)
    made = ClusterPort(cluster.app, "replica", cluster.node, settings, ManagerClient(cluster.app))
    yield made
    made.close()


def test_layers_come_group_by_group_and_stay_although_the_tier_lets_go_of_them(
    cluster: KVCluster, port: ClusterPort
) -> None:
    _, spans = sequence(77, 3)
    cluster.save(spans)
    loads = [PlannedLoad(span.key, span.start_block, 4, "cpu", cluster.node, SEGMENT_BYTES) for span in spans]

    arrivals = port.fetch_layers(loads, [1, 2], time.monotonic() + patience(30.0))
    first = [next(arrivals) for _ in spans]
    cluster.ask_tier("evict", [span.key for span in spans])
    assert cluster.ask_tier("fetch", [span.key for span in spans]) == [None] * 3
    cluster.save(sequence(78, 3)[1])  # takes the memory, if it is free
    rest = list(arrivals)

    assert [(each.segment, each.layers) for each in [*first, *rest]] == [
        (0, 1), (1, 1), (2, 1), (0, 2), (1, 2), (2, 2),
    ]  # fmt: skip
    assert [bytes(each.sealed or b"") for each in rest] == [buffer.tobytes() for buffer in sealed(spans)]


def test_redis_brings_no_layers(port: ClusterPort) -> None:
    assert port.brings_layers("cpu")
    assert not port.brings_layers("redis")
