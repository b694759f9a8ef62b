"""Streams that leave a replica whose last outputs their client has yet to read: attempts alone, without a server."""

from __future__ import annotations

import asyncio
import types
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from typing import Any

import pytest
import ray.exceptions
from fake_backend import FakeReplicas, Script, say
from prometheus_client import CollectorRegistry
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from app.continuation import generated_tokens
from app.continuation.handover import Handovers, handover_choice
from app.metrics.ingress import IngressMetrics
from app.metrics.labels import DRAINED, MOVED, REBALANCED
from app.openai.poison_registry import PoisonRegistry
from app.openai.retries import PromptSender, RetryingStream
from deployments.protocol.wire import GenerateRequest
from load_tests.harness.patience import patience

ALL = list(range(100))


async def no_names(tokens: Sequence[int]) -> tuple[Sequence[bytes], Sequence[bytes]]:
    return [], []


def attempts(script: Script, handovers: Handovers | None = None, **replicas: Any) -> RetryingStream:
    params = SamplingParams(max_tokens=len(ALL), output_kind=RequestOutputKind.DELTA)
    request = GenerateRequest("r", [1, 2, 3], params, "", [])
    behind = FakeReplicas(script, **replicas)
    metrics = IngressMetrics(CollectorRegistry())
    sender = PromptSender(behind, metrics, 3, PoisonRegistry(60.0), handovers)
    return RetryingStream(sender, request, 0.0, no_names)


def run(test: Callable[[], Coroutine[Any, Any, None]]) -> None:
    asyncio.run(asyncio.wait_for(test(), patience(120)))


@pytest.mark.parametrize("piled_up", [3, 10, 80])
def test_what_piled_up_while_it_was_told_to_leave_is_neither_lost_nor_said_again(
    piled_up: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where that is more than `MOST_TOKENS` has room for: the client reads slowly, and all of it comes at once."""
    monkeypatch.setattr(generated_tokens, "MOST_TOKENS", 70)

    async def script(request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        rest = ALL[len(request.resumed_tokens) :]
        if request.progress.replica != "a":
            yield say(request, rest, "", finished=True)
            return
        yield say(request, rest[:1], "", finished=False)
        yield say(request, rest[1 : 1 + piled_up], "", finished=False)
        await asyncio.Event().wait()

    class Piled(FakeReplicas):
        """As `app.backend.replica_call`: what was read before the abort is told before the end."""

        async def abort(self, request_id: str) -> None:
            await asyncio.sleep(0.01)
            await super().abort(request_id)

    async def test() -> None:
        one = attempts(script)
        one._replicas = Piled(script)
        said: list[int] = []
        async for output in one.outputs():
            said += output.outputs[0].token_ids
            if len(said) == 1:
                one.leave(MOVED)
        assert said == ALL
        assert one.resumed == 1

    run(test)


@pytest.mark.parametrize(("target", "came_to"), [("c", "c"), ("", "b"), ("gone", "b"), ("failed", "failed")])
def test_it_goes_on_at_the_replica_that_it_was_told_to_or_else_at_any_and_only_that_once(
    target: str, came_to: str
) -> None:
    async def script(request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        if request.progress.replica == "failed" and not request.resumed_tokens:
            raise ray.exceptions.ActorDiedError
        rest = ALL[len(request.resumed_tokens) :]
        if len(request.resumed_tokens) > 1:
            yield say(request, rest, "", finished=True)
            return
        yield say(request, rest[:1], "", finished=False)
        await asyncio.Event().wait()

    async def test() -> None:
        one = attempts(script, names=("failed", "a", "b", "c"))
        said: list[int] = []
        async for output in one.outputs():
            said += output.outputs[0].token_ids
            if len(said) == 1:
                one.leave(MOVED, target)
                assert one.answered.why_not_moved() == "it is leaving its replica already"
                one.leave(DRAINED, "a")
            elif len(said) == 2:
                one.leave(REBALANCED)
        assert said == ALL
        asked = one._replicas.requests  # type: ignore[attr-defined]
        assert [request.progress.replica for request in asked[:3]] == ["failed", "a", came_to]
        assert [request.prefer for request in asked] == ["", "", target, ""]
        assert asked[-1].avoid == ("failed", came_to)

    run(test)


def test_a_client_that_reads_slowly_makes_no_hand_over_look_slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """All requests' hand-overs are chosen by the gaps that were seen: one client's pauses are no business of theirs."""
    now, gaps = [100.0], []
    monkeypatch.setattr("app.openai.retries.time", types.SimpleNamespace(monotonic=lambda: now[0]))

    async def script(request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        if request.phase == "prefill":
            yield say(request, [0], "", finished=False)
            yield say(request, [], "", finished=True)
            return
        now[0] += 0.5  # the gap
        yield say(request, ALL[1:], "", finished=True)

    async def test() -> None:
        choice = handover_choice("always", block_tokens=1)
        handovers = Handovers(choice, 0.5, lambda _: 3, lambda outcome, gap_s: gaps.append((outcome, gap_s)))
        one, said = attempts(script, handovers, roles={"a": "prefill", "b": "decode"}), []
        async for output in one.outputs():
            said += output.outputs[0].token_ids
            now[0] += 60.0  # nobody reads
        assert said == ALL
        assert gaps == [("done", 0.5)]

    run(test)
