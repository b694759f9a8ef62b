"""What fills teach of the rate of prefills, alone and several at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.engine.handle import EngineHandle
from deployments.protocol.wire import KV_CACHE_USAGE
from deployments.replica.fill_queue import ColdChunk
from deployments.replica.fill_request import fill_request
from deployments.replica.fill_times import FillTimes
from deployments.replica.prompt_plans import PromptPlans
from deployments.replica.replica import Replica

TOKENS = 512


class Samples(list[tuple[Any, ...]]):
    def add(self, *sample: Any) -> None:
        self.append(sample)


@pytest.fixture
def samples() -> Samples:
    return Samples()


def test_a_fill_alone_is_a_sample_as_any_prompt_is(samples: Samples) -> None:
    times = FillTimes(samples.add)
    for context in (0, 64):
        with times.fill():
            times.computed(TOKENS, 5.0, 6.0, context)
    assert samples == [(TOKENS, 1.0, 0), (TOKENS, 1.0, 64)]


def test_fills_that_overlap_are_one_sample(samples: Samples) -> None:
    times = FillTimes(samples.add)
    with ExitStack() as fills:
        for _ in range(4):
            fills.enter_context(times.fill())
        for _ in range(4):
            times.computed(TOKENS, 5.0, 9.0, 0)
        with times.fill():
            times.computed(TOKENS, 9.0, 10.0, 0)
        assert samples == []
    assert samples == [(5 * TOKENS, 5.0, 0)]


def test_fills_of_which_one_broke_off_are_no_sample_and_the_next_is(samples: Samples) -> None:
    times = FillTimes(samples.add)
    with times.fill():
        with pytest.raises(asyncio.CancelledError), times.fill():
            raise asyncio.CancelledError
        times.computed(TOKENS, 5.0, 9.0, 0)
    assert samples == []
    with times.fill():
        times.computed(TOKENS, 5.0, 6.0, 0)
    assert samples == [(TOKENS, 1.0, 0)]


def test_a_replica_that_fills_several_chunks_in_one_step_reports_that_step_once() -> None:
    class Port(Samples):
        async def plan(self, *_: Any) -> None:
            return None

        def report_rate(self, sample: tuple[Any, ...]) -> None:
            self.append(sample)

    class Engine:
        errored = False

        def __init__(self) -> None:
            self.all_here = asyncio.Barrier(4)

        async def generate(self, *_: Any, **__: Any) -> AsyncIterator[Any]:
            await self.all_here.wait()
            usage = {"device": 0, "cpu": 0, "redis": 0, "recomputed": TOKENS, "replica": ""}
            yield SimpleNamespace(
                finished=True,
                kv_transfer_params={KV_CACHE_USAGE: usage},
                metrics=SimpleNamespace(scheduled_ts=2.0, first_token_ts=6.0),
            )

    class Manager:
        async def ask(self, *_: Any, **__: Any) -> bool:
            return True

        def tell(self, *_: Any) -> None:
            pass

    async def fill() -> Port:
        port, handle, made = Port(), object.__new__(EngineHandle), object.__new__(Replica)
        handle._llm, handle._port, handle._begun, handle._terms = Engine(), port, {}, {}  # type: ignore[assignment]
        handle._names_requests = False
        handle.close = lambda: None  # type: ignore[method-assign]
        made._engine, made._link, made._plans = handle, None, PromptPlans(handle, 32)
        made._fill_times = FillTimes(made._plans.report_prefill)
        made._name, made._manager, made._fill_deadline_s = "replica", Manager(), 1.0  # type: ignore[assignment]
        chunks = [ColdChunk(range(TOKENS), [bytes([number]) * 32], "salt", "") for number in range(4)]
        await asyncio.gather(*(made._compute_chunk(fill_request(chunk)) for chunk in chunks))
        return port

    assert asyncio.run(fill()) == [("prefill", 4 * TOKENS, 4.0, 0)]
