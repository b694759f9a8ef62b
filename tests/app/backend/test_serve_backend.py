"""The ingress's side of Serve: handle calls keep apart, and who may be sent to."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any

import pytest
from ray.core.generated.gcs_pb2 import ActorTableData
from ray.exceptions import ActorDiedError, ActorUnavailableError
from ray.serve.context import _get_serve_request_context, _RequestContext, _serve_request_context

from app.backend import serve as backend_module
from app.backend.parts_watch import SILENT_S
from app.backend.replica_call import CallTimes
from app.backend.serve import ServeReplicas, outside_http_request, serve_backend
from app.gate.errors import UnavailableError
from configs.settings import load_settings
from deployments.protocol.wire import GenerateRequest, PinnedCall
from deployments.router.running_replicas import RunningReplicas, running_replicas
from kvmanager.scheduling.rebalancing import KVReport
from load_tests.harness.patience import patience


class FakeHandle:
    """A Serve handle of which every call gives the outputs of a script."""

    def __init__(self, script: Any) -> None:
        self.generate = self
        self.cancelled = 0
        self.asked_for: dict[str, Any] = {}
        self._script = script

    def options(self, **options: Any) -> FakeHandle:
        self.asked_for = {**self.asked_for, **options}
        return self

    def remote(self, request: GenerateRequest) -> FakeHandle:
        self._outputs = self._script(request)
        self._replica_result_future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        return self

    def __aiter__(self) -> FakeHandle:
        return self

    async def __anext__(self) -> Any:
        return await anext(self._outputs)

    def cancel(self) -> None:
        self.cancelled += 1


def prompt(**options: Any) -> GenerateRequest:
    params: Any = None
    return GenerateRequest("r", [1, 2], params, "salt", [], **options)


async def read(replicas: ServeReplicas, request: GenerateRequest) -> list[Any]:
    return [output async for output in replicas.generate(request)]


async def read_over(handle: FakeHandle, request: GenerateRequest, **times: float) -> list[Any]:
    return await read(replicas_over(handle, **times), request)


def replicas_over(handle: FakeHandle, running: RunningReplicas | None = None, **times: float) -> ServeReplicas:
    """`times`: those of `CallTimes` that the test is about; it waits for none of the others."""
    parts: Any = SimpleNamespace(ranks={}, silence_s={})
    soon = CallTimes(**{"told_within_s": 0.01, **times})
    return ServeReplicas(handle, parts, running or RunningReplicas(), times=soon)  # type: ignore[arg-type]


class Actor:
    """Ray's handle of a replica, as far as its local state goes."""

    def __init__(self, state: Any = ActorTableData.ActorState.ALIVE) -> None:
        self.state = state

    def _get_local_state(self) -> Any:
        return self.state


def test_a_number_names_the_replica_that_can_be_sent_to_and_roles_and_drains_say_why_not() -> None:
    async def check() -> None:
        running = RunningReplicas()
        running.tell({"old": Actor(), "a": Actor(), "b": Actor()})
        ranks = {"old": 1, "a": 1, "b": 0, "c": 2}
        parts: Any = SimpleNamespace(ranks=ranks, roles={"a": "prefill", "b": "decode"}, silence_s={})
        replicas = ServeReplicas(FakeHandle(None), parts, running)  # type: ignore[arg-type]
        running.tell({"a": Actor(), "b": Actor()})
        assert [replicas.named(rank) for rank in (0, 1, 2, 3)] == ["b", "a", "c", None]
        assert replicas.why_not_to("c", "") == replicas.why_not_to("old", "") == "it is being stopped, or is gone"
        assert [replicas.why_not_to(name, "") for name in ("a", "b")] == [None, None]
        assert replicas.why_not_to("a", "decode") == "its role is prefill"
        assert replicas.why_not_to("b", "decode") is None
        parts.roles = {"a": "prefill", "b": "prefill"}
        assert replicas.why_not_to("a", "decode") is None, "nobody has the role"

    asyncio.run(check())


def test_a_call_that_cannot_be_looked_after_keeps_nobody_from_the_others() -> None:
    class Call:
        def __init__(self, error: Exception | None) -> None:
            self.error = error
            self.looks = 0

        def look(self, now: float) -> None:
            self.looks += 1
            if self.error is not None:
                raise self.error

        def look_for_silence(self, now: float, silent: Collection[str]) -> None:
            pass

        def look_for_drain(self, now: float, living: Collection[str], drain_s: float) -> None:
            pass

    async def check() -> None:
        replicas = replicas_over(FakeHandle(None), look_s=0.001)
        broken, sound = Call(RuntimeError("gRPC is odd")), Call(None)
        replicas._live.update(broken=broken, sound=sound)  # type: ignore[dict-item]
        async with asyncio.timeout(patience(60)):
            while sound.looks < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert broken.looks > 1

    asyncio.run(check())


def test_replicas_are_called_over_grpc_whatever_built_the_application(monkeypatch: pytest.MonkeyPatch) -> None:
    class Manager:
        async def ask(self, method: str, *args: Any, timeout_s: float) -> Any:
            return {"replicas": {}, "cpu_tiers": []}

    async def check() -> None:
        monkeypatch.setattr(backend_module, "ManagerClient", lambda app_name: Manager())
        handle = FakeHandle(None)
        serve_backend(handle, "an-application-of-its-own", load_settings({}))  # type: ignore[arg-type]
        assert handle.asked_for["_by_reference"] is False

    asyncio.run(check())


def test_a_replica_is_silent_only_where_others_report_and_the_router_takes_it_last() -> None:
    async def check() -> None:
        running = RunningReplicas()
        running.tell({"a": Actor(), "b": Actor()})
        silence_s = {"a": 0.5, "b": 0.5}
        parts: Any = SimpleNamespace(ranks={}, silence_s=silence_s)
        replicas = ServeReplicas(FakeHandle(None), parts, running, times=CallTimes(look_s=0.001))  # type: ignore[arg-type]
        assert replicas.silent() == frozenset()
        silence_s["b"] = SILENT_S + 1
        assert replicas.silent() == {"b"}
        async with asyncio.timeout(patience(60)):
            while "b" not in replicas._failed:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        assert "a" not in replicas._failed
        silence_s["a"] = SILENT_S + 1
        assert replicas.silent() == frozenset(), "it may be the manager that hears nobody"
        silence_s.clear()
        assert replicas.silent() == frozenset(), "a manager that has just started"
        silence_s["a"] = 0.5
        assert replicas.silent() == {"b"}, "it was silent, and is still not heard of"
        silence_s["b"] = 0.5
        assert replicas.silent() == frozenset()
        silence_s.clear()
        silence_s["a"] = 0.5
        assert replicas.silent() == frozenset(), "the next manager has not heard of it yet"

    asyncio.run(check())


@pytest.mark.parametrize("words", [0, 2])
def test_a_replica_that_is_gone_is_told_to_the_router_of_every_later_request(words: int) -> None:
    async def die(request: GenerateRequest) -> Any:
        request.progress.replica = "a"
        for number in range(words):
            yield number
        raise ActorDiedError

    async def check() -> None:
        replicas, later = replicas_over(FakeHandle(die)), prompt()
        with pytest.raises(ActorDiedError):
            await read(replicas, prompt())
        with pytest.raises(ActorDiedError):
            await read(replicas, later)
        assert "a" in later.progress.failed

    asyncio.run(check())


def test_a_replica_that_refuses_a_request_is_not_taken_for_gone() -> None:
    async def refuse(request: GenerateRequest) -> Any:
        request.progress.replica = "a"
        raise ValueError("no")
        yield

    async def check() -> None:
        request = prompt()
        with pytest.raises(ValueError, match="no"):
            await read(replicas_over(FakeHandle(refuse)), request)
        assert "a" not in request.progress.failed

    asyncio.run(check())


def test_a_prompt_sent_again_that_no_replica_takes_is_refused_and_cancelled() -> None:
    async def nobody(request: GenerateRequest) -> Any:
        await asyncio.Event().wait()
        yield

    async def check() -> None:
        handle = FakeHandle(nobody)
        with pytest.raises(UnavailableError):
            await asyncio.wait_for(read_over(handle, prompt(avoid=("a",)), reroute_s=0.05), patience(60))
        assert handle.cancelled
        while len(asyncio.all_tasks()) > 2:  # noqa: ASYNC110 - all but this and the look for dead replicas end
            await asyncio.sleep(0.01)

    asyncio.run(check())


@pytest.mark.parametrize("avoid", [(), ("a",)], ids=["first", "again"])
def test_a_prompt_that_a_replica_has_taken_may_take_its_time(avoid: tuple[str, ...]) -> None:
    async def slow(request: GenerateRequest) -> Any:
        request.progress.replica = "b"
        await asyncio.sleep(0.2)
        assert not request.progress.first_token
        yield 1
        assert request.progress.first_token
        yield 2

    assert asyncio.run(read_over(FakeHandle(slow), prompt(avoid=avoid), reroute_s=0.05)) == [1, 2]


def test_a_retry_that_gives_nothing_ends_and_its_failure_is_passed_on() -> None:
    async def nothing(request: GenerateRequest) -> Any:
        return
        yield

    async def fail(request: GenerateRequest) -> Any:
        raise KeyError("x")
        yield

    assert asyncio.run(read_over(FakeHandle(nothing), prompt(avoid=("a",)))) == []
    with pytest.raises(KeyError):
        asyncio.run(read_over(FakeHandle(fail), prompt(avoid=("a",))))


def test_a_call_outside_the_http_request_does_not_carry_its_internal_id() -> None:
    token = _serve_request_context.set(_RequestContext(_internal_request_id="of-the-http-request"))
    try:
        inside = _get_serve_request_context()._internal_request_id
        outside = outside_http_request(lambda: _get_serve_request_context()._internal_request_id)
    finally:
        _serve_request_context.reset(token)

    assert inside == "of-the-http-request"
    assert outside == ""


async def nobody(request: GenerateRequest) -> Any:
    await asyncio.Event().wait()
    yield


def test_who_is_left_is_what_serve_and_ray_say_and_not_the_manager() -> None:
    async def check() -> None:
        running, actors = RunningReplicas(), {"a": Actor(), "b": Actor()}
        replicas = replicas_over(FakeHandle(nobody), running)
        assert (replicas.none_left(), replicas.ranks()) == (False, None), "nobody has told"
        running.tell(actors)
        assert (replicas.none_left(), replicas.ranks()) == (False, None), "a manager that knows nobody takes none away"
        replicas._parts.ranks = {"a": 0, "b": 1, "gone": 2}
        assert replicas.ranks() == {0, 1}
        actors["a"].state = ActorTableData.ActorState.DEAD
        assert (replicas.none_left(), replicas.ranks()) == (False, {1})
        replicas._dead.note("b")
        assert (replicas.none_left(), replicas.ranks()) == (True, frozenset())

    asyncio.run(check())


@pytest.mark.parametrize(
    ("error", "none_left"), [(ActorUnavailableError("gone", b"x" * 16), False), (ActorDiedError(), True)]
)
def test_a_replica_that_could_not_be_reached_once_may_still_be_sent_to(error: Exception, none_left: bool) -> None:
    async def fail(request: GenerateRequest) -> Any:
        request.progress.replica = "a"
        raise error
        yield

    async def check() -> None:
        running = RunningReplicas()
        running.tell({"a": Actor()})
        replicas, later = replicas_over(FakeHandle(fail), running), prompt()
        for request in (prompt(), later):
            with pytest.raises(type(error)):
                await read(replicas, request)
        assert "a" in later.progress.failed
        assert replicas.none_left() is none_left

    asyncio.run(check())


def test_a_pinned_prompt_whose_replica_is_gone_is_refused_soon() -> None:
    async def check() -> None:
        with pytest.raises(UnavailableError):
            await asyncio.wait_for(read_over(FakeHandle(nobody), prompt(replica_pin=0), reroute_s=0.05), patience(60))

    asyncio.run(check())


def test_reports_count_of_replicas_that_live_and_spoke_lately() -> None:
    async def check() -> None:
        running, kv = RunningReplicas(), {name: KVReport(1.0, 100, 50) for name in ("a", "b", "gone", "unheard")}
        running.tell({"a": Actor(), "b": Actor(), "unheard": Actor()})
        parts: Any = SimpleNamespace(ranks={}, kv=kv, silence_s={"a": 0.5, "b": SILENT_S + 1, "gone": 0.5})
        replicas = ServeReplicas(FakeHandle(None), parts, running)  # type: ignore[arg-type]
        assert replicas.kv_reports() == {"a": kv["a"]}

    asyncio.run(check())


def test_metrics_are_asked_of_the_replicas_that_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    class Manager:
        async def ask(self, method: str, *args: Any, timeout_s: float) -> Any:
            return {"replicas": {}, "cpu_tiers": []}

    class Metrics(FakeHandle):
        @property
        def metrics(self) -> Any:
            return SimpleNamespace(remote=self._answer)

        async def _answer(self, call: PinnedCall) -> str:
            asked.append(call.replica)
            return ""

    async def check() -> None:
        monkeypatch.setattr(backend_module, "ManagerClient", lambda app_name: Manager())
        running = running_replicas("metrics-test")
        behind = serve_backend(Metrics(nobody), "metrics-test", load_settings({"replicas": 2}))  # type: ignore[arg-type]
        for names in ("pq", "qr"):
            running.tell({name: Actor() for name in names})
            for source in behind.metrics()[2:]:
                await source()

    asyncio.run(check())
    assert asked == ["p", "q", "q", "r"]
