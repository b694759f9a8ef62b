"""Two Ray nodes on one machine: what one makes serves the other, which is added later; a lost node's segments are
misses, and nothing hangs."""

from __future__ import annotations

import multiprocessing
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from kv_cluster import FINGERPRINT, PATIENCE_S, SEGMENT_BLOCKS, SEGMENT_BYTES, SIZES, offered, sealed, sequence, until
from ray import cloudpickle
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from redis_fixture import SECRET

from app.launch.ray_start import agents_given_ports
from configs.kv_section import KVSettings
from deployments.cpu_tier.actor import tier_name
from deployments.manager import tier_registry as tier_seats
from deployments.manager.actor import KVManagerActor
from deployments.port.cluster_port import ClusterPort
from deployments.protocol.engine_facts import EngineFacts
from deployments.protocol.kv_port import OfferedBlocks
from deployments.protocol.manager_client import MANAGER_ACTOR, SERVE_NAMESPACE, ManagerClient
from deployments.redis_tier.actor import RedisTier, RedisTierConfig
from deployments.redis_tier.server import EmbeddedRedis
from deployments.segment_store.redis_connection import connect
from kvmanager.config import ManagerConfig
from kvmanager.moves.plan import PlanQuery
from load_tests.harness.patience import patience

pytestmark = pytest.mark.server
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import a test

APP = "twonodes"
DEADLINE_S = 5.0
SILENCE_S = 3.0
ROOM = 40 * SEGMENT_BYTES


class Manager(KVManagerActor):
    """Takes no tier for silent or late because the machine stands still, but while it is told to forget silent ones."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        tier_seats.TIER_SILENCE_S = tier_seats.ANSWER_S = PATIENCE_S
        super().__init__(*args, **kwargs)

    async def forget_after(self, silence_s: float) -> None:
        tier_seats.TIER_SILENCE_S = silence_s


class Replica:
    """A replica's port on a node, and a thread of the replica that calls it."""

    def __init__(self, name: str, rank: int, node_id: str, redis_url: str) -> None:
        self._me = (name, node_id)
        settings = KVSettings(
            cpu_tier_bytes=ROOM,
            redis_url=redis_url,
            prefetch_workers=1,
            load_deadline_s=4 * DEADLINE_S,
        )
        self._manager = ManagerClient(APP)
        self._port = ClusterPort(APP, name, node_id, settings, self._manager)
        self._rank = rank

    def save(self, blocks: OfferedBlocks, buffers: Mapping[bytes, Any]) -> int:
        """`buffers`: the sealed segments, by key."""
        grant = self._port.offer(blocks, SIZES)
        if grant is None:
            return 0
        wanted = [(span, buffers[span.key]) for span in grant.spans]
        return self._port.store(grant, wanted)

    def load(self, hashes: Sequence[bytes]) -> tuple[list[tuple[str, str]], list[bytes | None]]:
        """Plan and fetch: (tier, holder) of each planned segment, and what came."""
        self._register()
        plan = self._manager.ask_blocking("plan", *self._me, PlanQuery(hashes), timeout_s=patience(PATIENCE_S))
        loads = plan.segments
        found = [view and bytes(view) for view in self._port.fetch(loads, time.monotonic() + DEADLINE_S)]
        self._port.release(plan.lease_id)
        self._port.flush()
        return [(load.tier, load.holder) for load in loads], found

    def _register(self) -> None:
        name, node_id = self._me
        self._manager.ask_blocking(
            "register_replica", name, self._rank, node_id, [], EngineFacts(FINGERPRINT), timeout_s=patience(PATIENCE_S)
        )


class TwoNodes:
    """A cluster of a head that holds only the manager, and of nodes that are added, each with a tier and a replica."""

    def __init__(self, folder: Path) -> None:
        head = {"num_cpus": 2, "object_store_memory": 80 << 20, "include_dashboard": False}
        with agents_given_ports():
            self.cluster = Cluster(initialize_head=True, connect=False, head_node_args=head)
        ray.init(address=self.cluster.address, namespace=SERVE_NAMESPACE, log_to_driver=False)
        self.redis_server = EmbeddedRedis(folder, 64 << 20)
        self.redis_server.start()
        self.redis = connect(self.redis_server.url, 10.0)
        name = f"SERVE_DEPLOYMENT_ACTOR::{APP}::replica::v1::{MANAGER_ACTOR}"
        config = ManagerConfig(blocks_per_segment=SEGMENT_BLOCKS, lease_s=2 * DEADLINE_S, redis_min_uses=1.5)
        here = self._only_on(ray.get_runtime_context().get_node_id())
        self.manager = (
            ray.remote(Manager)
            .options(name=name, namespace=SERVE_NAMESPACE, num_cpus=0, scheduling_strategy=here)
            .remote(config, with_redis=True)
        )
        redis_config = RedisTierConfig(
            app_name=APP, url=self.redis_server.url, folder="", namespace="test", budget_bytes=100 * SEGMENT_BYTES,
            expire_s=0, deadline_s=DEADLINE_S,
        )  # fmt: skip
        redis_tier = ray.remote(RedisTier).options(num_cpus=0, scheduling_strategy=here)
        self.redis_tier = redis_tier.remote(redis_config, SECRET)
        self.nodes: dict[str, Any] = {}
        self.ids: dict[str, str] = {}
        self.replicas: dict[str, Any] = {}

    def add(self, name: str) -> None:
        """One more node, with a replica."""
        with agents_given_ports():
            self.nodes[name] = self.cluster.add_node(num_cpus=2, object_store_memory=80 << 20)
        self.ids[name] = self.nodes[name].node_id
        self.replicas[name] = self._replica(name, len(self.replicas))
        self.call(name, "load", sequence(0, 1)[0])
        self.until_well(name)

    def until_well(self, name: str) -> None:
        """The manager knows the node's tier, its worker, and Redis."""
        until(lambda: self.ids[name] in self.ask("api", "parts")["cpu_tiers"], "the node has a tier")
        until(lambda: self.ask("api", "parts")["redis"]["state"] == "ok", "Redis is indexed")
        until(lambda: self.workers(name), "its tier has its prefetch worker")

    @staticmethod
    def _only_on(node_id: str) -> NodeAffinitySchedulingStrategy:
        return NodeAffinitySchedulingStrategy(node_id=node_id, soft=False)

    def _replica(self, name: str, rank: int) -> Any:
        node_id = self.ids[name]
        options = {"num_cpus": 0, "scheduling_strategy": self._only_on(node_id)}
        return ray.remote(Replica).options(**options).remote(name, rank, node_id, self.redis_server.url)

    def ask(self, method: str, *args: Any) -> Any:
        return ray.get(getattr(self.manager, method).remote(*args), timeout=patience(PATIENCE_S))

    def workers(self, name: str) -> int:
        tier = ray.get_actor(tier_name(APP, self.ids[name]), namespace=SERVE_NAMESPACE)
        return int(ray.get(tier.stats.remote(), timeout=patience(PATIENCE_S))["workers"])

    def call(self, replica: str, method: str, *args: Any) -> Any:
        return ray.get(getattr(self.replicas[replica], method).remote(*args), timeout=patience(PATIENCE_S))

    def save(self, replica: str, seed: int, segments: int) -> list[bytes]:
        """The hashes of a prompt that this replica has saved; its next use earns it a copy in Redis."""
        hashes, spans = sequence(seed, segments)
        self.call(replica, "load", hashes)
        buffers = dict(zip((span.key for span in spans), sealed(spans), strict=True))
        assert self.call(replica, "save", offered(spans), buffers) == segments
        return hashes

    def close(self) -> None:
        ray.shutdown()
        self.cluster.shutdown()
        self.redis_server.stop()


def expected(seed: int, segments: int) -> list[bytes]:
    return [buffer.tobytes() for buffer in sealed(sequence(seed, segments)[1])]


def test_what_a_node_made_serves_the_other_and_still_does_from_redis_when_the_node_is_lost(tmp_path: Path) -> None:
    # In a process of its own: this one may be the driver of another Ray, and can be of one only.
    with ProcessPoolExecutor(max_workers=1, mp_context=multiprocessing.get_context("spawn")) as process:
        process.submit(run_scenario, tmp_path).result()


def run_scenario(folder: Path) -> None:
    nodes = TwoNodes(folder)
    started = psutil.Process().children(recursive=True)
    try:
        scenario(nodes)
    finally:
        added = psutil.Process().children(recursive=True)
        nodes.close()
        _, left = psutil.wait_procs({*started, *added}, timeout=1.0)
        for process in left:  # a killed node's agents do not end with it
            process.kill()


def scenario(nodes: TwoNodes) -> None:
    nodes.add("a")
    hashes = nodes.save("a", 1, 3)
    nodes.add("b")
    in_a = [("cpu", nodes.ids["a"])] * 3
    assert nodes.call("b", "load", hashes) == (in_a, expected(1, 3)), "node A's objects, byte for byte, at node B"
    theirs = nodes.save("b", 4, 2)
    in_b = [("cpu", nodes.ids["b"])] * 2
    assert nodes.call("a", "load", theirs) == (in_b, expected(4, 2)), "and others have what the added node made"

    until(lambda: nodes.ask("api", "lookup", hashes)["redis"] == len(hashes), "a second use brings it to Redis")
    only_a = nodes.save("a", 2, 3)
    assert nodes.ask("api", "lookup", only_a) == {**nodes.ask("api", "lookup", only_a), "cpu": len(only_a), "redis": 0}

    nodes.cluster.remove_node(nodes.nodes["a"], allow_graceful=False)

    # Until the manager has noticed, a plan may name node A: then it is a miss, within the deadline.
    began = time.monotonic()
    _, found = nodes.call("b", "load", only_a)
    assert all(segment is None for segment in found)
    assert time.monotonic() - began < PATIENCE_S
    nodes.ask("forget_after", SILENCE_S)
    until(lambda: nodes.ids["a"] not in nodes.ask("api", "parts")["cpu_tiers"], "the manager has forgotten node A")
    nodes.ask("forget_after", PATIENCE_S)
    nodes.until_well("b")
    assert nodes.call("b", "load", only_a) == ([], []), "plans name it no more"
    assert nodes.ask("api", "lookup", only_a)["cpu"] == 0

    planned, found = nodes.call("b", "load", hashes)
    assert [tier for tier, _ in planned] == ["redis"] * 3
    assert found == expected(1, 3), "Redis' copies serve node B"

    mine = nodes.save("b", 3, 2)
    assert nodes.call("b", "load", mine) == (in_b, expected(3, 2)), "node B goes on by itself"
    assert len(nodes.ask("api", "parts")["cpu_tiers"]) == 1
