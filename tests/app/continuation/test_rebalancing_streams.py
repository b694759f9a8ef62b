"""Streams that leave a replica short of KV: what the policy is told, and what becomes of its orders. No server."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from fake_backend import FakeReplicas, say
from prometheus_client import CollectorRegistry
from vllm.outputs import RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams

from app.continuation import moves
from app.continuation.live import LiveRequest, LiveRequests
from app.continuation.moves import StreamRebalancing
from app.metrics.ingress import IngressMetrics
from app.openai.poison_registry import PoisonRegistry
from app.openai.retries import PromptSender, RetryingStream
from deployments.protocol.wire import GenerateRequest
from kvmanager.scheduling.rebalancing import SHORT_REPORTS, KVReport
from load_tests.harness.patience import patience

TOKENS = list(range(200))


async def no_names(tokens: Sequence[int]) -> tuple[Sequence[bytes], Sequence[bytes]]:
    return [], []


async def endless_at_a(request: GenerateRequest) -> AsyncIterator[RequestOutput]:
    """At "a" one token, then nothing; elsewhere the rest."""
    left = TOKENS[len(request.resumed_tokens) :]
    if request.progress.replica != "a":
        yield say(request, left, "", finished=True)
        return
    yield say(request, left[:1], "", finished=False)
    await asyncio.Event().wait()


class Ingress:
    """Streams, and the part that moves them."""

    def __init__(self, **replicas: Any) -> None:
        self.replicas = FakeReplicas(endless_at_a, **replicas)
        self.metrics = IngressMetrics(CollectorRegistry())
        self.live = LiveRequests()
        self.part = StreamRebalancing(self.live, self.replicas, 32)
        self.said: dict[str, list[int]] = {}
        self.readers: dict[str, asyncio.Task[None]] = {}

    async def begin(self, name: str, prompt_tokens: int, **params: Any) -> RetryingStream:
        chosen = SamplingParams(**{"max_tokens": 200, "output_kind": RequestOutputKind.DELTA, **params})
        request = GenerateRequest(name, [1] * prompt_tokens, chosen, "", [], predicted_tokens=150)
        one = RetryingStream(PromptSender(self.replicas, self.metrics, 3, PoisonRegistry(60.0)), request, 0.0, no_names)
        self.live.add(LiveRequest(name, name, "", prompt_tokens, one))
        self.said[name] = []

        async def read() -> None:
            async for output in one.outputs():
                self.said[name] += output.outputs[0].token_ids

        self.readers[name] = asyncio.create_task(read())
        while not self.said[name]:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0)
        return one

    def report(self, turn: int, **held: int) -> None:
        self.replicas.kv = {name: KVReport(float(turn), 100, blocks) for name, blocks in held.items()}
        self.part.look(1000.0 + turn)

    def moved(self) -> float:
        return float(self.metrics.resumed.labels("rebalanced")._value.get())


def run(test: Any) -> None:
    asyncio.run(asyncio.wait_for(test(), patience(120)))


def test_the_longest_stream_of_a_short_replica_goes_on_where_there_is_room(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "app.continuation.moves")

    async def test() -> None:
        it = Ingress()
        await it.begin("short", 200)
        long = await it.begin("long", 900)
        await it.begin("whole answers are not continued", 1200, prompt_logprobs=1)
        for turn in range(SHORT_REPORTS):
            assert it.moved() == 0
            it.report(turn, a=95, b=60, c=20)
        await it.readers["long"]
        assert it.said["long"] == TOKENS
        assert [request.progress.replica for request in it.replicas.requests] == ["a", "a", "a", "c"]
        assert it.replicas.requests[-1].resumed_tokens == [0]
        assert (it.moved(), long.resumed) == (1, 1)
        (line,) = [record.getMessage() for record in caplog.records if record.name == moves.__name__]
        assert "request long moves from replica a (95 of 100 KV blocks held, 0 wanted) to c (20 of 100)" in line
        assert "901 tokens, about 149 to come" in line
        for reader in it.readers.values():
            reader.cancel()

    run(test)


def test_a_replica_that_is_stopped_or_has_another_role_gets_none() -> None:
    async def test() -> None:
        it = Ingress(stopped=("b",))
        await it.begin("one", 900)
        for turn in range(2 * SHORT_REPORTS):
            it.report(turn, a=95, b=0)
        assert len(it.replicas.requests) == 1
        it.readers["one"].cancel()

    run(test)


def test_what_fails_is_logged_once_and_goes_on(monkeypatch: pytest.MonkeyPatch, own_records: Any) -> None:
    monkeypatch.setattr(moves, "EVERY_S", 0.001)

    async def test() -> None:
        it, looks = Ingress(), []

        def fail() -> Any:
            looks.append(1)
            raise KeyError("x")

        it.replicas.kv_reports = fail  # type: ignore[method-assign]
        watching = asyncio.create_task(it.part.run())
        while len(looks) < 3:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.001)
        watching.cancel()
        assert len([record for record in own_records() if record.levelno == logging.ERROR]) == 1

    run(test)
