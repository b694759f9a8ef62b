"""Prompts are sent again over a real Serve handle: how a lost replica looks from outside is Ray's to say, not ours.

The replicas are called as the ingress calls them: by gRPC, on one loop. What crosses stands in for vLLM's objects, so
that a replica starts, and is replaced, without importing vLLM; `tests/end_to_end` sends the real ones.
"""

from __future__ import annotations

import asyncio
import gc
import importlib
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar, TypeVar

import grpc
import pytest
import ray
from prometheus_client import CollectorRegistry
from ray import cloudpickle, serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle
from vllm.v1.engine.exceptions import EngineDeadError

from app.backend.replica_call import CallTimes
from app.backend.replica_errors import crash_report, replica_gone
from app.backend.serve import ServeReplicas
from app.metrics.ingress import IngressMetrics
from app.openai.poison_registry import PoisonRegistry
from app.openai.retries import PromptSender, RetryingStream
from configs.settings import load_settings
from deployments.protocol.wire import GenerateRequest
from deployments.replica.serve_process import SERVE_OPTIONS
from deployments.router.prefix_affinity import PrefixAffinityRouter, RouterOptions
from deployments.router.running_replicas import running_replicas
from load_tests.harness.patience import patience

pytestmark = pytest.mark.server
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import a test

REPLICAS = 2
PATIENCE_S = 120.0
HANGS_S = 3600.0
"""Longer than any test waits."""
REPLACED_S = 240.0
"""Within this a replica that was killed is replaced, whatever else the machine does."""
T = TypeVar("T")


def take(note: Path, name: str) -> str:
    """What the note says, and note who read it; nothing for all but the first."""
    try:
        text = note.read_text(encoding="utf-8")
        note.rename(f"{note}.read-by-{name}")
    except FileNotFoundError:
        return ""
    return text


def word(name: str, request_id: str, tokens: Sequence[int] = (), finished: bool = False) -> Any:
    """An output that says who gave it, in the place of the prompt."""
    answer = SimpleNamespace(token_ids=list(tokens))
    return SimpleNamespace(
        request_id=request_id,
        prompt=name,
        outputs=[answer],
        finished=finished,
        num_cached_tokens=None,
        kv_transfer_params=None,
    )


def told(outputs: Sequence[Any]) -> list[tuple[str, str]]:
    """By whom, and under which id."""
    return [(output.prompt or "", output.request_id) for output in outputs]


class Voice:
    """Says its own name and the id it was asked under; the first one to read a fatal note does what it says."""

    async def generate(self, request: GenerateRequest) -> AsyncIterator[Any]:
        note = (request.trace_headers or {}).get("note")
        name = serve.get_replica_context().replica_id.unique_id
        fatal = take(Path(note), name) if note else ""
        said = len(request.resumed_tokens)
        if fatal == "speak and die":
            yield word(name, request.request_id, [7])
        if fatal.endswith("die") or fatal == "hang up":
            # The word, and that the prompt is taken, are on their way: else Serve itself asks another replica.
            await asyncio.sleep(0.5)
        if fatal.endswith("die"):
            os.kill(os.getpid(), signal.SIGKILL)
        if fatal in ("lose your engine", "name the suspects"):  # their exceptions come with vLLM, which takes seconds
            engine = await asyncio.to_thread(importlib.import_module, "deployments.engine.crash_report")
            raise engine.EngineDiedError(("r", "s")) if fatal == "name the suspects" else engine.EngineDeadError
        if fatal == "refuse":
            raise ValueError("no such thing")
        if fatal.endswith("be still"):
            try:  # a caller may leave before this goes on behind the word
                if fatal.startswith("speak"):
                    yield word(name, request.request_id, [7])
                await asyncio.sleep(HANGS_S)
            finally:
                take(Path(note + ".waits"), "the one that ends")
        if fatal == "hang up":  # the process lives, its connection does not
            gc.unfreeze()  # Serve has frozen what there was at the start
            (server,) = [each for each in gc.get_objects() if isinstance(each, grpc.aio.Server)]
            hanging_up = asyncio.ensure_future(server.stop(0))
            await asyncio.sleep(HANGS_S)
            await hanging_up
        at_length = fatal == "speak at length"
        yield word(name, request.request_id, [8] if said else [], finished=not at_length)
        if at_length:
            yield word(name, "x" * 20_000_000 + str(len(request.prompt_token_ids)), finished=True)


class Nobody:
    """Stands in for the watch on the manager's parts."""

    ranks: ClassVar[dict[str, int]] = {}
    silence_s: ClassVar[dict[str, float]] = {}


Test = Callable[[ServeReplicas, IngressMetrics], Awaitable[None]]


class Voices:
    """Two replicas behind the project's router, and the loop on which they are called."""

    def __init__(self, name: str) -> None:
        options = RouterOptions.from_settings(load_settings({})).as_dict()
        deployment: Any = serve.deployment(
            Voice,
            num_replicas=REPLICAS,
            ray_actor_options={"num_cpus": 0, "runtime_env": {"env_vars": dict(SERVE_OPTIONS)}},
            max_ongoing_requests=100,
            health_check_period_s=0.5,  # by which a replica that died is found, and replaced
            graceful_shutdown_wait_loop_s=0.1,
            graceful_shutdown_timeout_s=1,  # nobody waits for what is still said at the end
            request_router_config=RequestRouterConfig(
                request_router_class=PrefixAffinityRouter,  # type: ignore[arg-type]
                request_router_kwargs={"options": options},
            ),
        )
        self.name = name
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()  # Serve's news want a loop that runs
        handle = serve.run(deployment.bind(), name=name, route_prefix=None)
        self.replicas = self._await(self._called(pickle.loads(pickle.dumps(handle))))

    def _await(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _called(self, handle: DeploymentHandle) -> ServeReplicas:
        """As in the ingress's process, whose environment says so; but Ray may take its time to tell of a death."""
        handle._init(_run_router_in_separate_loop=False)
        self._handle = handle.options(_by_reference=False)  # type: ignore[call-arg]
        return self.called(CallTimes(told_within_s=patience(PATIENCE_S), reroute_s=patience(PATIENCE_S)))

    def called(self, times: CallTimes) -> ServeReplicas:
        """On the loop."""
        parts: Any = Nobody()
        return ServeReplicas(self._handle, parts, running_replicas(self.name), times=times)

    def run(self, test: Test, least: int = REPLICAS) -> None:
        """`least`: how many replicas the test needs."""

        async def run() -> None:
            async with asyncio.timeout(patience(REPLACED_S)):
                await until(lambda: len(self.replicas.living() or ()) >= least)
            async with asyncio.timeout(patience(PATIENCE_S)):
                await test(self.replicas, IngressMetrics(CollectorRegistry()))

        self._await(run())

    def end(self) -> None:
        serve.delete(self.name)
        self._loop.call_soon_threadsafe(self._loop.stop)


@pytest.fixture(scope="module")
def voices(serve_port: int) -> Iterator[Voices]:
    """For all tests that leave both replicas well, or dead and replaced."""
    voices = Voices("voices")
    yield voices
    voices.end()


def ask(note: Path | None, request_id: str = "r", streams: bool = False) -> GenerateRequest:
    kind = SimpleNamespace(name="DELTA" if streams else "FINAL_ONLY")
    params: Any = SimpleNamespace(output_kind=kind, n=1, max_tokens=None, prompt_logprobs=None)
    headers = {"note": str(note)} if note else {}
    return GenerateRequest(request_id, [1, 2, 3], params, "salt", [], trace_headers=headers)


def attempts(replicas: ServeReplicas, metrics: IngressMetrics, request: GenerateRequest) -> RetryingStream:
    async def names(tokens: Sequence[int]) -> tuple[list[bytes], list[bytes]]:
        return [], []

    return RetryingStream(
        PromptSender(replicas, metrics, REPLICAS, PoisonRegistry(600.0)), request, time.monotonic(), names
    )


async def answer(replicas: ServeReplicas, metrics: IngressMetrics, request: GenerateRequest) -> list[tuple[str, str]]:
    return told([output async for output in attempts(replicas, metrics, request).outputs()])


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


def resumed(metrics: IngressMetrics) -> dict[str, float]:
    (family,) = metrics.resumed.collect()
    return {s.labels["reason"]: s.value for s in family.samples if s.name.endswith("_total") and s.value}


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110
        await asyncio.sleep(0.01)


async def sent_to(request: GenerateRequest) -> str:
    """The replica that has taken the prompt."""
    await until(lambda: bool(request.progress.replica))
    return request.progress.replica


async def read(replicas: ServeReplicas, request: GenerateRequest) -> list[Any]:
    return [output async for output in replicas.generate(request)]


@pytest.mark.parametrize("text", ["be still", "speak and be still"])
def test_a_request_whose_client_leaves_ends_at_its_replica(voices: Voices, tmp_path: Path, text: str) -> None:
    async def check(replicas: ServeReplicas, metrics: IngressMetrics) -> None:
        note = written(tmp_path, text)
        (tmp_path / "note.waits").touch()
        request = ask(note)
        reading = asyncio.ensure_future(read(replicas, request))
        await sent_to(request)
        await until(lambda: not note.exists())
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        await until(lambda: not (tmp_path / "note.waits").exists())

    voices.run(check)


def test_a_stream_is_moved_away_from_a_replica_that_is_well(voices: Voices, tmp_path: Path) -> None:
    async def check(replicas: ServeReplicas, metrics: IngressMetrics) -> None:
        note = written(tmp_path, "speak and be still")
        (tmp_path / "note.waits").touch()
        stream = attempts(replicas, metrics, ask(note, streams=True))
        outputs = []
        async for output in stream.outputs():
            outputs.append(output)
            stream.leave("moved")  # once it has ended there is nothing to leave
        (first, _), (second, _) = told(outputs)
        assert first == reader(note) != second
        assert resumed(metrics) == {"moved": 1}
        assert {first, second} <= (replicas.living() or set()), "both are well"
        await until(lambda: not (tmp_path / "note.waits").exists())

    voices.run(check)


# From here on the next test waits until a replica is trusted again, or replaced.


def test_a_dead_engines_prompt_is_answered_by_the_other_and_so_are_the_next(voices: Voices, tmp_path: Path) -> None:
    async def check(replicas: ServeReplicas, metrics: IngressMetrics) -> None:
        while len({(await answer(replicas, metrics, ask(None)))[0][0] for _ in range(4)}) < REPLICAS:  # noqa: ASYNC110
            await asyncio.sleep(0.1)  # the router has not heard of both yet
        note = written(tmp_path, "lose your engine")
        ((name, request_id),) = await answer(replicas, metrics, ask(note))
        assert (name != reader(note), request_id, retries(metrics)) == (True, "r-retry1", {"engine_dead": 1})
        for number in range(6):
            assert await answer(replicas, metrics, ask(None, str(number))) == [(name, str(number))]

    voices.run(check)


def test_long_prompts_and_long_outputs_fit(voices: Voices, tmp_path: Path) -> None:
    """The router remembers for minutes who got it: behind this it prefers the other replica."""

    async def check(replicas: ServeReplicas, metrics: IngressMetrics) -> None:
        request = ask(written(tmp_path, "speak at length"))
        request.prompt_token_ids = list(range(2_000_000))
        _, (_, text) = told(await read(replicas, request))
        assert len(text) == 20_000_007

    voices.run(check, least=1)


def test_what_a_replica_raises_arrives_as_what_it_was(voices: Voices, tmp_path: Path) -> None:
    async def check(replicas: ServeReplicas, metrics: IngressMetrics) -> None:
        with pytest.raises(ValueError, match="no such thing"):
            await read(replicas, ask(written(tmp_path, "refuse")))
        with pytest.raises(EngineDeadError) as error:
            await read(replicas, ask(written(tmp_path, "name the suspects")))
        assert (replica_gone(error.value), crash_report(error.value)) == ("engine_dead", ("r", "s"))

    voices.run(check, least=1)


def test_a_killed_replicas_prompt_is_answered_by_the_other(voices: Voices, tmp_path: Path) -> None:
    async def check(replicas: ServeReplicas, metrics: IngressMetrics) -> None:
        note = written(tmp_path, "die")
        ((name, request_id),) = await answer(replicas, metrics, ask(note))
        assert name != reader(note)
        assert request_id == "r-retry1"
        assert retries(metrics) == {"process_gone": 1}
        while reader(note) in (replicas.living() or ()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert not replicas.none_left(), "the other one is known to live, without any KV manager"

    voices.run(check)


@pytest.mark.long(
    "tests/end_to_end/replicas/test_keys_and_roles.py::test_answers_that_are_handed_over_are_the_undisturbed_ones"
)
def test_the_stream_of_a_replica_killed_in_mid_stream_goes_on_at_the_other(voices: Voices, tmp_path: Path) -> None:
    async def check(replicas: ServeReplicas, metrics: IngressMetrics) -> None:
        note = written(tmp_path, "speak and die")
        stream = attempts(replicas, metrics, ask(note, streams=True))
        outputs = [output async for output in stream.outputs()]
        (first, first_id), (second, second_id) = told(outputs)
        assert (first, first_id, second_id) == (reader(note), "r", "r-retry1")
        assert second not in ("", first)
        assert [list(output.outputs[0].token_ids) for output in outputs] == [[7], [8]]
        assert (retries(metrics), resumed(metrics)) == ({}, {"process_gone": 1})

    voices.run(check)


@pytest.mark.long("tests/app/openai/test_retry_over_serve.py::test_ray_says_whether_somebody_meant_a_death")
@pytest.mark.parametrize("text", ["be still", "speak and be still"])
def test_a_replica_that_serve_ends_is_no_fault_of_its_requests(voices: Voices, tmp_path: Path, text: str) -> None:
    async def check(replicas: ServeReplicas, metrics: IngressMetrics) -> None:
        request = ask(written(tmp_path, text))
        reading = asyncio.ensure_future(read(replicas, request))
        name = await sent_to(request)
        ray.kill(running_replicas(voices.name)._handle(name))
        with pytest.raises(ray.exceptions.ActorDiedError) as error:
            await reading
        assert replica_gone(error.value) == "stopped"
        assert name not in (replicas.living() or ())

    voices.run(check)


def test_a_replica_that_only_its_callers_cannot_reach_is_charged_with_nothing(voices: Voices, tmp_path: Path) -> None:
    async def check(_: ServeReplicas, metrics: IngressMetrics) -> None:
        note = written(tmp_path, "hang up")
        replicas = voices.called(CallTimes(reroute_s=patience(PATIENCE_S)))  # of one that lives Ray has nothing to tell
        try:
            ((name, request_id),) = await answer(replicas, metrics, ask(note))
            assert (name != reader(note), request_id, retries(metrics)) == (True, "r-retry1", {"unreachable": 1})
            assert reader(note) in (replicas.living() or ())
        finally:  # Serve does not replace the one that hangs up
            ray.kill(running_replicas(voices.name)._handle(reader(note)))

    voices.run(check)


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
            ray.get(waiting, timeout=patience(120))
        reasons.append(replica_gone(error.value))
    assert reasons == ["stopped", "process_gone"]
