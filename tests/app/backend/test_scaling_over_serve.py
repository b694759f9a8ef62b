"""Replicas come and go in a real Serve, under streams: the real hook, manager and router over a made-up engine."""

from __future__ import annotations

import asyncio
import pickle
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import ray
from ray import cloudpickle, serve
from ray.serve.config import DeploymentActorConfig, RequestRouterConfig

from app.backend import parts_watch
from app.backend import serve as serve_module
from app.backend.parts_watch import PartsWatch, health_probe
from app.backend.serve import ServeReplicas
from configs.settings import load_settings
from deployments.manager.actor import KVManagerActor
from deployments.protocol.engine_facts import EngineFacts
from deployments.protocol.manager_client import MANAGER_ACTOR, ManagerClient
from deployments.protocol.wire import GenerateRequest
from deployments.replica.manager_link import ManagerLink
from deployments.replica.prompt_plans import PromptPlans
from deployments.replica.replica import Replica, _rank_now
from deployments.replica.serve_process import SERVE_OPTIONS
from deployments.router.prefix_affinity import PrefixAffinityRouter, RouterOptions
from deployments.router.running_replicas import RunningReplicas, running_replicas
from deployments.scaling.policy import replica_options
from kvmanager.config import ManagerConfig
from load_tests.harness.patience import patience

pytestmark = pytest.mark.server
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import a test

APP = "scaling"
WORDS = 30
WORD_S = 0.1
PATIENCE_S = 120.0
SETTINGS = {
    "replicas": {"min": 1, "max": 2},
    "scaling": {"upscale_delay_s": 1, "downscale_delay_s": 5},
    "engine": {"max_num_seqs": 4},
}


class MadeUpEngine:
    """An engine whose device each stream fills by a fifth."""

    shares_kv = False
    facts = EngineFacts(b"made up")
    dead = None

    def __init__(self) -> None:
        self.ongoing = 0
        self.waiting = 0

    async def kv_pressure(self) -> float:
        return min(1.0, 0.2 * self.ongoing)

    async def kv_report(self) -> None:
        return None

    async def needs_resync(self) -> bool:
        return False

    def close(self) -> None:
        pass


class Speaker(Replica):
    """The real replica, but for its engine, which says its words one after the other."""

    def __init__(self) -> None:
        self._name = serve.get_replica_context().replica_id.unique_id
        self._ending = False
        self._manager = ManagerClient(APP)
        self._plans = PromptPlans(None, 32)
        self._engine: Any = MadeUpEngine()
        node_id = ray.get_runtime_context().get_node_id()
        self._link = ManagerLink(self._manager, self._name, _rank_now, node_id, self._engine)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Any]:
        self._engine.ongoing += 1
        try:
            for number in range(WORDS):
                yield self._name, number
                await asyncio.sleep(WORD_S)
        finally:
            self._engine.ongoing -= 1


class Cluster:
    """The application, and the loop on which its replicas are called as the ingress calls them."""

    def __init__(self) -> None:
        self.settings = load_settings(SETTINGS)
        manager = DeploymentActorConfig(
            name=MANAGER_ACTOR,
            actor_class=ray.remote(KVManagerActor),
            init_kwargs={"config": ManagerConfig(blocks_per_segment=4)},
            actor_options={"num_cpus": 0, "max_concurrency": 100},
        )
        deployment: Any = serve.deployment(
            Speaker,
            **replica_options(self.settings),
            ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": dict(SERVE_OPTIONS)}},
            max_ongoing_requests=100,
            graceful_shutdown_wait_loop_s=0.5,
            graceful_shutdown_timeout_s=PATIENCE_S,
            deployment_actors=[manager],
            request_router_config=RequestRouterConfig(
                request_router_class=PrefixAffinityRouter,  # type: ignore[arg-type]
                request_router_kwargs={"options": RouterOptions.from_settings(self.settings).as_dict()},
            ),
        )
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()
        self._handle = pickle.loads(pickle.dumps(serve.run(deployment.bind(), name=APP, route_prefix=None)))

    def run(self, scenario: Any) -> Any:
        async def run() -> Any:
            self._handle._init(_run_router_in_separate_loop=False)
            running, parts = running_replicas(APP), PartsWatch(ManagerClient(APP))
            replicas = ServeReplicas(self._handle.options(_by_reference=False), parts, running)
            async with asyncio.timeout(patience(PATIENCE_S)):
                return await scenario(self, replicas, parts, running)

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result()

    def end(self) -> None:
        serve.delete(APP)
        self._loop.call_soon_threadsafe(self._loop.stop)


@pytest.fixture
def cluster(serve_port: int) -> Iterator[Cluster]:
    cluster = Cluster()
    yield cluster
    cluster.end()


class Load:
    """So many streams at any time, each read to its end."""

    def __init__(self, replicas: ServeReplicas) -> None:
        self._replicas = replicas
        self._tasks: set[asyncio.Task[None]] = set()
        self.streams = 0
        self.heard: list[list[Any]] = []
        self.broken: list[BaseException] = []
        self._keeping = asyncio.get_running_loop().create_task(self._keep())

    async def _keep(self) -> None:
        number = 0
        while True:
            while len(self._tasks) < self.streams:
                number += 1
                task = asyncio.get_running_loop().create_task(self._read(number))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            await asyncio.sleep(0.02)

    async def _read(self, number: int) -> None:
        params: Any = None
        request = GenerateRequest(f"r{number}", [1, 2, 3], params, "salt", [])
        try:
            self.heard.append([output async for output in self._replicas.generate(request)])
        except Exception as error:
            self.broken.append(error)

    async def end(self) -> None:
        self._keeping.cancel()
        await asyncio.gather(*self._tasks)


def test_replicas_come_with_streams_and_go_with_them_and_none_is_broken(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (parts_watch, serve_module):  # none is missing because the machine stands still
        monkeypatch.setattr(module, "SILENT_S", PATIENCE_S)
    states: set[str] = set()
    counts: list[int] = []

    async def scenario(cluster: Cluster, replicas: ServeReplicas, parts: PartsWatch, running: RunningReplicas) -> None:
        probe = health_probe(parts, replicas.living, cluster.settings, lambda: running.listed)
        running.listen(counts.append)

        async def until(condition: Any) -> None:
            while not condition():
                states.add((await probe()).parts.get("replicas", {"state": "ok"})["state"])
                await asyncio.sleep(0.05)

        await until(lambda: len(replicas.living() or ()) == 1 and len(parts.silence_s) == 1)
        states.clear()  # it has just started
        (first,) = replicas.living() or ()
        load = Load(replicas)
        load.streams = 6  # more than a device, and more than an engine computes at once
        await until(lambda: len(replicas.living() or ()) == 2)
        await until(lambda: any(words[0][0] != first for words in load.heard))  # the new one has answered
        load.streams = 2  # little enough for one
        await until(lambda: len(replicas.living() or ()) == 1)
        await until(lambda: len(parts.silence_s) == 1)  # what Serve took away has said good-bye to the manager
        heard = len(load.heard)
        await until(lambda: len(load.heard) > heard + 2)
        await load.end()

        assert load.broken == []
        assert all([number for _, number in words] == list(range(WORDS)) for words in load.heard)
        assert all(len({name for name, _ in words}) == 1 for words in load.heard)
        assert states == {"ok"}
        assert sorted(parts.ranks.values()) == [0]
        await until(lambda: parts.scaling.get("target") == 1)
        changes = parts.scaling["changes"]
        assert {direction for direction, _, _ in changes} == {"up", "down"}, changes

    cluster.run(scenario)
    assert [count for count, before in zip(counts, [0, *counts], strict=False) if count != before] == [1, 2, 1]
