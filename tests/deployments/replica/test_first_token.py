"""A prefill replica gives its one token at once, and its end when the prompt's KV is stored."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from types import MappingProxyType, SimpleNamespace
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer, FastIncrementalDetokenizer

from deployments.protocol.wire import KV_CACHE_USAGE, GenerateRequest
from deployments.replica.prompt_plans import PromptPlans
from deployments.replica.replica import Replica, goes_on, take_token


def last_output(text: str = " token", reason: str = "length") -> RequestOutput:
    completion = CompletionOutput(
        index=0, text=text, token_ids=[7], cumulative_logprob=None, logprobs=["one"], finish_reason=reason  # type: ignore[arg-type, list-item]
    )  # fmt: skip
    usage = {"device": 0, "cpu": 0, "redis": 0, "recomputed": 200, "replica": "0"}
    return RequestOutput("r", None, None, None, [completion], True, kv_transfer_params={KV_CACHE_USAGE: usage})


class Room:
    """Answers with one output; `saved` waits for the test's word."""

    shares_kv = True
    dead = None
    terms = MappingProxyType({})

    def __init__(self, output: RequestOutput) -> None:
        self.output = output
        self.asked: list[float] = []
        self.prompts: list[Any] = []
        self.stored = asyncio.Event()
        self.answer = True

    async def generate(self, prompt: Any) -> AsyncIterator[RequestOutput]:
        self.prompts.append(prompt)
        yield self.output

    async def plan(self, *asked: Any) -> None:
        return None

    def report_rate(self, sample: Any) -> None:
        pass

    def close(self) -> None:
        pass

    async def saved(self, within_s: float) -> bool:
        self.asked.append(within_s)
        await self.stored.wait()
        return self.answer


@pytest.fixture(autouse=True)
def _numbered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replica, "rank", 0)


def replica(handle: Room) -> Any:
    made: Any = object.__new__(Replica)
    made._engine, made._plans = handle, PromptPlans(handle, 32)  # type: ignore[arg-type]
    made._link = None
    return made


def request(**options: Any) -> GenerateRequest:
    made = GenerateRequest("r", list(range(200)), SamplingParams(max_tokens=1), "salt", [b"h" * 32] * 6)
    return replace(made, **options)


def test_the_token_comes_before_its_kv_is_stored_and_the_end_after() -> None:
    async def check() -> None:
        handle = Room(last_output())
        outputs = replica(handle).generate(request(phase="prefill", store_within_s=0.5))
        first = await anext(outputs)
        assert (first.finished, first.outputs[0].token_ids, first.outputs[0].text) == (False, [7], " token")
        assert (first.outputs[0].finish_reason, first.kv_transfer_params, first.metrics) == (None, None, None)
        ending = asyncio.ensure_future(anext(outputs))
        await asyncio.sleep(0.01)
        assert not ending.done()
        assert handle.asked == [0.5]
        handle.stored.set()
        end = await ending
        assert (end.finished, end.outputs[0].finish_reason) == (True, "length")
        assert (list(end.outputs[0].token_ids), end.outputs[0].text, end.outputs[0].logprobs) == ([], "", None)
        assert end.kv_transfer_params is not None
        assert end.kv_transfer_params[KV_CACHE_USAGE]["recomputed"] == 200
        assert handle.prompts[0].short_tokens == 1, "however short it is, it is stored"

    asyncio.run(check())


def test_an_end_comes_also_where_nothing_was_stored_in_time() -> None:
    async def check() -> None:
        handle = Room(last_output())
        handle.answer = False
        handle.stored.set()
        assert len([one async for one in replica(handle).generate(request(store_within_s=0.5))]) == 2

    asyncio.run(check())


@pytest.mark.parametrize(("reason", "within_s"), [("stop", 0.5), ("length", 0.0)])
def test_an_answer_that_is_whole_is_one_output_and_waits_for_nothing(reason: str, within_s: float) -> None:
    async def check() -> None:
        handle = Room(last_output(reason=reason))
        (only,) = [one async for one in replica(handle).generate(request(store_within_s=within_s))]
        assert only.finished
        assert (only.outputs[0].token_ids, only.outputs[0].finish_reason) == ([7], reason)
        assert handle.asked == []

    asyncio.run(check())


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        ({}, "abcdef"),
        ({"stop": "xy"}, "abcde"),
        ({"stop": ["x", "wxyz"]}, "abc"),
        ({"stop": ["a much longer stop string"]}, ""),
        ({"stop": ["wxyz"], "include_stop_str_in_output": True}, "abcdef"),
    ],
)
def test_what_may_still_become_a_stop_string_is_held_back_as_vllm_does(options: dict[str, Any], shown: str) -> None:
    output, params = last_output("abcdef"), SamplingParams(**options)
    assert goes_on(output)
    assert take_token(output, params).outputs[0].text == shown
    request: Any = SimpleNamespace(sampling_params=params)
    detokenizer = BaseIncrementalDetokenizer.__new__(FastIncrementalDetokenizer)
    BaseIncrementalDetokenizer.__init__(detokenizer, request)
    detokenizer.output_text = "abcdef"
    assert detokenizer.get_next_output_text(False, True) == shown


def test_short_tokens_are_the_managers_for_other_prompts() -> None:
    async def check() -> None:
        handle = Room(last_output("x", "stop"))
        made = replica(handle)
        made._plans._short.heard(0.0, 150)
        [one async for one in made.generate(request())]
        assert handle.prompts[0].short_tokens == 150

    asyncio.run(check())
