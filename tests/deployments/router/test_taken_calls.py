"""Serve sends no stream again whose replica has said that it takes it, and died at once; it does where the replica says
nothing."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata
from ray import ActorID
from ray.exceptions import ActorUnavailableError
from ray.serve._private.common import RequestMetadata
from ray.serve._private.request_router import replica_wrapper

from deployments.router import prefix_affinity
from deployments.router.prefix_affinity import TakenCall, use_taken_calls

LOST = AioRpcError(grpc.StatusCode.UNAVAILABLE, Metadata(), Metadata())


class Call:
    """A stream over gRPC that is over before anybody asked whether it was taken."""

    cancelled = False

    def __init__(self, said: Metadata | None) -> None:
        self._said = said

    def __aiter__(self) -> Call:
        return self

    async def __anext__(self) -> Any:
        raise LOST

    async def wait_for_connection(self) -> None:
        raise LOST

    def cancel(self) -> None:
        self.cancelled = True

    async def initial_metadata(self) -> Metadata:
        if self._said is None:
            await asyncio.Event().wait()
        assert self._said is not None
        return self._said

    def add_done_callback(self, callback: Any) -> None:
        pass


class CallIntoTheVoid(Call):
    """To a replica behind a cut link: it lives, and nothing comes of it."""

    async def wait_for_connection(self) -> None:
        await asyncio.Event().wait()


def over(said: Metadata | None) -> TakenCall:
    return taken(Call(said))


def taken(call: Any) -> TakenCall:
    metadata = RequestMetadata(
        request_id="r", internal_request_id="r", is_streaming=True, _by_reference=False, _on_separate_loop=False
    )
    return TakenCall(call, metadata, ActorID.nil(), asyncio.get_running_loop(), with_rejection=True)


def test_what_was_taken_stays_and_its_loss_comes_with_the_first_output() -> None:
    async def check() -> None:
        call = over(Metadata(("accepted", "1"), ("num_ongoing_requests", "3")))
        answer = await call.get_rejection_response()
        assert answer is not None
        assert (answer.accepted, answer.num_ongoing_requests) == (True, 3)
        with pytest.raises(ActorUnavailableError):
            await anext(call)  # type: ignore[call-overload]

    asyncio.run(check())


@pytest.mark.parametrize(
    "said",
    [Metadata(), Metadata(("accepted", "0"), ("num_ongoing_requests", "3")), None],
    ids=["no", "refused", "never"],
)
def test_what_was_not_taken_may_go_elsewhere(said: Metadata | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_affinity, "SAID_S", 0.05)

    async def check() -> None:
        with pytest.raises(ActorUnavailableError):
            await over(said).get_rejection_response()

    asyncio.run(check())


def test_a_replica_that_does_not_say_whether_it_takes_a_call_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_affinity, "TAKEN_UP_S", 0.05)
    call = CallIntoTheVoid(None)

    async def check() -> None:
        with pytest.raises(ActorUnavailableError):
            await taken(call).get_rejection_response()

    asyncio.run(check())
    assert call.cancelled, "or a replica that is back would begin it"


def test_serve_makes_its_calls_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica_wrapper, "gRPCReplicaResult", replica_wrapper.gRPCReplicaResult)
    use_taken_calls()
    assert "gRPCReplicaResult" in replica_wrapper.gRPCReplicaWrapper.send_request_python.__code__.co_names
    assert replica_wrapper.gRPCReplicaResult is TakenCall
