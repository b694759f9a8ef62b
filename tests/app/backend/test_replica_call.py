"""What the end of a call means, by what gRPC and Ray say of it; calls without an end, and those that nobody reads."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest
from grpc import StatusCode
from grpc.aio import AioRpcError, Metadata
from ray.core.generated.gcs_pb2 import ActorTableData
from ray.exceptions import ActorDiedError, ActorUnavailableError

from app.backend.replica_call import CallTimes, ReplicaCall
from app.backend.replica_errors import replica_gone
from deployments.protocol.wire import Progress
from deployments.router.running_replicas import RunningReplicas
from load_tests.harness.patience import patience

PATIENCE_S = 60.0
LAST_OUTPUTS_S = 1.0
UNHEARD_S = 5.0


class Actor:
    """Ray's handle of a replica: its local state, and a call that fails with the cause of its death."""

    def __init__(self) -> None:
        self.state = ActorTableData.ActorState.ALIVE
        self.get_num_ongoing_requests = self

    def _get_local_state(self) -> Any:
        return self.state

    def die(self) -> None:
        self.state = ActorTableData.ActorState.DEAD

    async def remote(self) -> int:
        raise ActorDiedError


class Outputs:
    """What a Serve handle gives: the outputs of a script, until it is cancelled."""

    def __init__(self, script: AsyncIterator[Any]) -> None:
        self._script = script
        self._reading: asyncio.Future[Any] | None = None
        self._replica_result_future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

    async def __anext__(self) -> Any:
        self._reading = asyncio.ensure_future(anext(self._script))
        return await self._reading

    def cancel(self) -> None:
        if self._reading is not None:
            self._reading.cancel()


def failing(error: BaseException) -> Callable[[], AsyncIterator[Any]]:
    async def fail() -> AsyncIterator[Any]:
        raise error
        yield

    return fail


async def silent() -> AsyncIterator[Any]:
    await asyncio.Event().wait()
    yield


def rpc(code: StatusCode) -> AioRpcError:
    return AioRpcError(code, Metadata(), Metadata())


class Scene:
    """A call that replica `a` has taken."""

    def __init__(self, script: Callable[[], AsyncIterator[Any]], told_within_s: float = PATIENCE_S) -> None:
        """`told_within_s`: how long Ray may take to tell of a death."""
        self.actor = Actor()
        self.running = RunningReplicas()
        self.running.tell({"a": self.actor})
        self.outputs = Outputs(script())
        times = CallTimes(told_within_s=told_within_s, last_outputs_s=LAST_OUTPUTS_S, unheard_s=UNHEARD_S)
        self.call = ReplicaCall(self.outputs, Progress(replica="a"), self.running, times)

    async def error(self) -> BaseException:
        with pytest.raises(BaseException) as error:  # noqa: PT011 (which one it is, is what is asked)
            await asyncio.wait_for(anext(self.call), patience(PATIENCE_S))
        return error.value


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(test())


ENDS = [
    ActorUnavailableError("gone", None),
    rpc(StatusCode.UNAVAILABLE),
    rpc(StatusCode.CANCELLED),
    rpc(StatusCode.INTERNAL),
    asyncio.CancelledError(),
]


@pytest.mark.parametrize("end", ENDS, ids=repr)
def test_the_end_of_a_dead_replicas_call_is_its_death_also_when_ray_tells_later(
    end: BaseException,
) -> None:
    async def check() -> None:
        scene = Scene(failing(end))
        asyncio.get_running_loop().call_later(0.01, scene.actor.die)
        scene.running.tell({})  # Serve no longer runs it
        assert isinstance(await scene.error(), ActorDiedError)

    run(check)


@pytest.mark.parametrize("end", ENDS, ids=repr)
def test_a_replica_that_lives_could_not_be_reached_and_other_errors_stay(
    end: BaseException,
) -> None:
    async def check() -> None:
        error = await Scene(failing(end), told_within_s=0.01).error()
        if isinstance(end, AioRpcError) and end.code() is StatusCode.INTERNAL:
            assert error is end
        else:
            assert replica_gone(error) == "unreachable"  # type: ignore[arg-type]

    run(check)


def test_who_is_cancelled_hears_of_no_replica() -> None:
    async def check() -> None:
        scene = Scene(silent)
        scene.actor.die()
        reading = asyncio.ensure_future(anext(scene.call))
        await asyncio.sleep(0)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading

    run(check)


def test_a_call_that_is_cancelled_ends_at_once_and_says_so() -> None:
    async def check() -> None:
        scene = Scene(silent)
        asyncio.get_running_loop().call_later(0.01, scene.call.cancel)
        assert isinstance(await scene.error(), asyncio.CancelledError)

    run(check)


def test_a_call_of_a_dead_replica_that_does_not_end_is_ended() -> None:
    async def check() -> None:
        scene = Scene(silent)
        reading = asyncio.ensure_future(scene.error())
        scene.call.look(0.0)
        scene.actor.die()
        scene.call.look(100.0)
        scene.call.look(100.0 + LAST_OUTPUTS_S / 2)
        await asyncio.sleep(0.01)
        assert not reading.done(), "its last outputs may be on their way"
        scene.call.look(100.0 + LAST_OUTPUTS_S)
        assert isinstance(await reading, ActorDiedError)

    run(check)


def test_a_call_without_outputs_of_a_silent_replica_is_ended_and_one_that_goes_on_is_not() -> None:
    async def check() -> None:
        more = asyncio.Event()

        async def slowly() -> AsyncIterator[Any]:
            await more.wait()
            yield "a word"
            await asyncio.Event().wait()

        scene = Scene(slowly, told_within_s=0.01)
        reading = asyncio.ensure_future(anext(scene.call))
        scene.call.look_for_silence(0.0, {"a"})
        scene.call.look_for_silence(UNHEARD_S, ())
        scene.call.look_for_silence(UNHEARD_S + 1, {"a"})
        more.set()
        assert await reading == "a word"
        error = asyncio.ensure_future(scene.error())
        scene.call.look_for_silence(2 * UNHEARD_S + 1, {"a"})
        scene.call.look_for_silence(3 * UNHEARD_S, {"a", "b"})
        await asyncio.sleep(0.01)
        assert not error.done(), "it has said something meanwhile"
        scene.call.look_for_silence(3 * UNHEARD_S + 1, {"a"})
        assert replica_gone(await error) == "unreachable"  # type: ignore[arg-type]

    run(check)


def test_a_replica_that_is_taken_out_of_service_is_left_when_its_time_is_over() -> None:
    told: list[str] = []

    async def check() -> None:
        scene = Scene(silent)
        scene.call._progress.on_drain = lambda: told.append("drains")

        def look(now: float, *living: str) -> int:
            scene.call.look_for_drain(now, living, 10.0)
            return len(told)

        assert look(0.0, "a", "b") == 0, "it runs"
        assert look(1.0, "b") == 0
        assert look(10.9, "b") == 0, "its answers have time to end by themselves"
        assert look(11.0, "b") == 1
        assert look(11.5) == 1, "there is nowhere to go"
        assert look(30.0, "a", "b") == 1, "it runs again"
        assert look(31.0, "b") == 1
        assert look(41.0, "b") == 2
        scene.actor.die()
        assert look(60.0, "b") == 2, "the dead end by themselves"

    run(check)
    assert told == ["drains"] * 2


def test_a_call_that_was_taken_and_not_yet_read_is_cancelled_at_its_replica() -> None:
    cancelled: list[str] = []

    class Taken:
        def cancel(self) -> None:
            cancelled.append("call")

    async def check() -> None:
        scene = Scene(silent)
        scene.outputs._replica_result_future.set_result(Taken())
        scene.call.cancel()
        failed = Scene(silent)
        failed.outputs._replica_result_future.set_exception(ValueError())
        failed.call.cancel()

    run(check)
    assert cancelled == ["call"]
