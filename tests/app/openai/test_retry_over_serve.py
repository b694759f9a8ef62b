"""Prompts are sent again over a real Serve handle: how a lost replica looks from outside is Ray's to say, not ours."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import ray
from prometheus_client import CollectorRegistry
from ray import cloudpickle, serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from vllm.v1.engine.exceptions import EngineDeadError

from app.backend.replica_errors import replica_gone
from app.backend.serve import ServeReplicas
from app.metrics.ingress import IngressMetrics
from app.openai.retries import Attempts
from app.openai.suspects import Suspects
from configs.settings import load_settings
from deployments.protocol.wire import GenerateRequest
from deployments.router.prefix_affinity import PrefixAffinityRouter, RouterOptions
from deployments.router.running_replicas import running_replicas

pytestmark = pytest.mark.server
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import a test

REPLICAS = 2
PATIENCE_S = 60.0


def take(note: Path, name: str) -> str:
    """What the note says, and note who read it; nothing for all but the first."""
    try:
        text = note.read_text()
        note.rename(f"{note}.read-by-{name}")
    except FileNotFoundError:
        return ""
    return text


class Voice:
    """Says its own name and the id it was asked under; the first one to read a fatal note does what it says."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[tuple[str, str]]:
        note = (request.trace_headers or {}).get("note")
        name = serve.get_replica_context().replica_id.unique_id
        fatal = take(Path(note), name) if note else ""
        if fatal == "speak and die":
            yield name, request.request_id
            await asyncio.sleep(0.5)  # the word is on its way
        if fatal.endswith("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        if fatal == "lose your engine":
            raise EngineDeadError
        yield name, request.request_id


class Nobody:
    """Stands in for the watch on the manager's parts."""

    ranks: ClassVar[dict[str, int]] = {}


@pytest.fixture(scope="module")
def voices(serve_port: int) -> Iterator[DeploymentHandle]:
    """The handle of two replicas behind the project's router."""
    options = RouterOptions.from_settings(load_settings({})).as_dict()
    deployment: Any = serve.deployment(
        Voice,
        num_replicas=REPLICAS,
        ray_actor_options={"num_cpus": 0},
        max_ongoing_requests=100,
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixAffinityRouter,  # type: ignore[arg-type]
            request_router_kwargs={"options": options},
        ),
    )
    yield serve.run(deployment.bind(), name="voices", route_prefix=None)
    serve.delete("voices")


def ask(note: Path | None, request_id: str = "r") -> GenerateRequest:
    params: Any = None
    headers = {"note": str(note)} if note else {}
    return GenerateRequest(request_id, [1, 2, 3], params, "salt", [], trace_headers=headers)


def on_a_loop(handle: DeploymentHandle, test: Callable[[ServeReplicas, IngressMetrics], Awaitable[None]]) -> None:
    parts: Any = Nobody()

    async def run() -> None:
        metrics = IngressMetrics(CollectorRegistry())
        async with asyncio.timeout(PATIENCE_S):
            await test(ServeReplicas(handle, parts, running_replicas("voices")), metrics)

    asyncio.run(run())


async def answer(replicas: ServeReplicas, metrics: IngressMetrics, request: GenerateRequest) -> list[Any]:
    return [output async for output in Attempts(request, replicas, metrics, REPLICAS, Suspects(600.0)).outputs()]


def written(folder: Path, text: str) -> Path:
    note = folder / "note"
    note.write_text(text)
    return note


def reader(note: Path) -> str:
    (read,) = note.parent.glob("note.read-by-*")
    return read.name.rpartition("-")[2]


def retries(metrics: IngressMetrics) -> dict[str, float]:
    (family,) = metrics.retried.collect()
    return {s.labels["reason"]: s.value for s in family.samples if s.name.endswith("_total") and s.value}


def test_a_dead_engines_prompt_is_answered_by_the_other_and_so_are_the_next(
    voices: DeploymentHandle, tmp_path: Path
) -> None:
    async def check(replicas: ServeReplicas, metrics: IngressMetrics) -> None:
        while len({(await answer(replicas, metrics, ask(None)))[0][0] for _ in range(4)}) < REPLICAS:  # noqa: ASYNC110
            await asyncio.sleep(0.1)  # the router has not heard of both yet
        note = written(tmp_path, "lose your engine")
        ((name, request_id),) = await answer(replicas, metrics, ask(note))
        assert (name != reader(note), request_id, retries(metrics)) == (True, "r-retry1", {"engine_dead": 1})
        for number in range(6):
            assert await answer(replicas, metrics, ask(None, str(number))) == [(name, str(number))]

    on_a_loop(voices, check)


def test_a_killed_replicas_prompt_is_answered_by_the_other(voices: DeploymentHandle, tmp_path: Path) -> None:
    async def check(replicas: ServeReplicas, metrics: IngressMetrics) -> None:
        note = written(tmp_path, "die")
        ((name, request_id),) = await answer(replicas, metrics, ask(note))
        assert name != reader(note)
        assert request_id == "r-retry1"
        (reason,) = retries(metrics)
        assert reason in ("process_gone", "unreachable")
        while reader(note) in (replicas.living() or ()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not replicas.none_left(), "the other one is known to live, without any KV manager"

    on_a_loop(voices, check)


def test_a_replica_killed_in_mid_stream_ends_the_stream_with_its_loss(voices: DeploymentHandle, tmp_path: Path) -> None:
    async def check(replicas: ServeReplicas, metrics: IngressMetrics) -> None:
        note, outputs = written(tmp_path, "speak and die"), []
        with pytest.raises(Exception) as error:  # noqa: PT012, PT011 (what Ray raises is read below)
            async for output in Attempts(ask(note), replicas, metrics, REPLICAS, Suspects(600.0)).outputs():
                outputs.append(output)  # noqa: PERF401 (they are wanted in spite of the error)
        assert outputs == [(reader(note), "r")]
        assert replica_gone(error.value)
        assert retries(metrics) == {}

    on_a_loop(voices, check)


class Mortal:
    def pid(self) -> int:
        return os.getpid()

    def wait(self) -> None:
        time.sleep(3600)


def test_ray_says_whether_somebody_meant_a_death(ray_cluster: Any) -> None:
    """What no request can be the reason of is told by Ray's words, which this holds."""
    reasons = []
    for meant in (True, False):
        actor = ray.remote(Mortal).options(num_cpus=0).remote()
        pid, waiting = ray.get(actor.pid.remote()), actor.wait.remote()
        if meant:
            ray.kill(actor)
        else:
            os.kill(pid, signal.SIGKILL)
        with pytest.raises(ray.exceptions.RayActorError) as error:
            ray.get(waiting, timeout=30)
        reasons.append(replica_gone(error.value))
    assert reasons == ["stopped", "process_gone"]
