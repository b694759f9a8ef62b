"""The engine on a thread of this process behaves as vLLM's own three processes do; the last test kills it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from live_engine import PATIENCE_S, LiveEngine
from live_handle import tiles_are_granted
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.request import RequestStatus

from deployments.engine.grammars.by_tenant import GrammarsByTenant
from load_tests.faults.inside_engine import die_of
from load_tests.harness.engine import greedy, prompt
from load_tests.harness.patience import patience, until

DEADLY = [7, 8, 9, 7, 8]


@contextlib.contextmanager
def stepwise(engine: LiveEngine) -> Iterator[threading.Semaphore]:
    """The engine does one step per permit, until the end of the block."""
    core = engine.thread.core
    permits = threading.Semaphore(0)
    step, free_running = core.step_fn, threading.Event()

    def gated() -> Any:
        while not free_running.is_set() and not permits.acquire(timeout=0.01):
            pass
        return step()

    core.step_fn = gated
    try:
        yield permits
    finally:
        free_running.set()
        engine.on_engine_thread(lambda: setattr(core, "step_fn", step))


def test_its_grammars_are_kept_apart_by_tenant(engine: LiveEngine) -> None:
    created: Any = engine.thread.core.structured_output_manager._create_grammar
    assert isinstance(created.__self__, GrammarsByTenant)


def test_every_token_is_streamed_before_the_next_is_computed(engine: LiveEngine) -> None:
    tokens = prompt(100, 40)
    alone, _ = engine.ask(tokens, planned=False)
    engine.clear_device()

    async def stream(permits: threading.Semaphore) -> list[int]:
        params = greedy(8, output_kind=RequestOutputKind.DELTA)
        received: list[int] = []
        outputs = engine.stream(tokens, params, planned=False)
        for _ in range(8):
            permits.release()
            output = await anext(outputs)
            assert len(output.outputs[0].token_ids) == 1
            received += output.outputs[0].token_ids
        assert output.finished
        return received

    with stepwise(engine) as permits:
        assert engine.run(stream(permits)) == alone


def test_sixteen_requests_at_once_answer_as_one_by_one(engine: LiveEngine) -> None:
    prompts = [prompt(110 + number, 20 + 13 * number) for number in range(16)]
    alone = [engine.ask(tokens, planned=False)[0] for tokens in prompts]
    engine.clear_device()

    async def together() -> list[list[int]]:
        outputs = await asyncio.gather(*(engine.answer(tokens, greedy(8), planned=False) for tokens in prompts))
        return [list(output.outputs[0].token_ids) for output in outputs]

    assert engine.run(together()) == alone


@pytest.fixture
def ends(engine: LiveEngine, monkeypatch: pytest.MonkeyPatch) -> list[RequestStatus]:
    """How each request ends, in this order."""
    seen: list[RequestStatus] = []
    finished = engine.scheduler.connector.request_finished

    def watch(request: Any, block_ids: list[int]) -> Any:
        seen.append(request.status)
        return finished(request, block_ids)

    monkeypatch.setattr(engine.scheduler.connector, "request_finished", watch)
    return seen


def assert_nothing_is_left(engine: LiveEngine) -> None:
    engine.settle()
    assert engine.llm.get_num_unfinished_requests() == 0
    assert engine.scheduler.requests == {}
    assert engine.blocks_in_use() == 0


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_a_client_that_leaves_aborts_the_request_and_frees_its_blocks(
    engine: LiveEngine, ends: list[RequestStatus], how: str
) -> None:
    async def leave() -> None:
        started = asyncio.Event()

        async def read() -> None:
            async for output in engine.stream(prompt(130, 100), greedy(1000), planned=False):
                if len(output.outputs[0].token_ids) >= 3:
                    started.set()

        if how == "cancel":
            task = asyncio.create_task(read())
            await started.wait()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            stream = engine.stream(prompt(130, 100), greedy(1000), planned=False)
            await anext(stream)
            await stream.aclose()

    engine.run(leave())

    assert_nothing_is_left(engine)
    assert ends == [RequestStatus.FINISHED_ABORTED]


@pytest.mark.parametrize("cancels", [1, 2], ids=["cancelled", "cancelled again while it is aborted"])
def test_a_client_that_leaves_during_a_step_before_the_engine_took_its_request_aborts_it(
    engine: LiveEngine, ends: list[RequestStatus], cancels: int
) -> None:
    async def begin() -> asyncio.Task[Any]:
        return asyncio.create_task(engine.answer(prompt(132, 40), greedy(1000), planned=False))

    async def leave(task: asyncio.Task[Any]) -> None:
        for _ in range(cancels):
            task.cancel()
            await asyncio.sleep(0.01)

    async def end(task: asyncio.Task[Any]) -> None:
        with pytest.raises(asyncio.CancelledError):
            await task

    with stepwise(engine):
        staying = engine.start(engine.answer(prompt(131, 40), greedy(4), planned=False))
        until(lambda: len(engine.scheduler.requests) == 1, "the engine waits in its first step")
        leaving = engine.run(begin())
        until(lambda: engine.llm.get_num_unfinished_requests() == 2, "vLLM's front knows both")
        engine.run(leave(leaving))

    engine.run(end(leaving))
    assert len(staying.result(patience(PATIENCE_S)).outputs[0].token_ids) == 4
    assert_nothing_is_left(engine)
    assert sorted(ends) == [RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_ABORTED]


def test_a_request_the_engine_cannot_take_ends_with_an_error_and_harms_nobody(
    engine: LiveEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(request: Any) -> Any:
        raise RuntimeError("no grammar")

    with monkeypatch.context() as patch:
        patch.setattr(engine.thread.core, "preprocess_add_request", refuse)
        output = engine.run(engine.answer(prompt(133, 40), greedy(4), planned=False))

    assert output.outputs[0].finish_reason == "error"
    assert_nothing_is_left(engine)
    assert len(engine.ask(prompt(133, 40))[0]) == 8


def test_calls_run_on_the_engine_thread_between_steps_while_a_request_streams(engine: LiveEngine) -> None:
    core = engine.thread.core
    step, stepping, steps = core.step_fn, False, 0

    def watched() -> Any:
        nonlocal stepping, steps
        stepping, steps = True, steps + 1
        try:
            return step()
        finally:
            stepping = False

    engine.on_engine_thread(lambda: setattr(core, "step_fn", watched))
    seen: list[tuple[str, bool, int]] = []

    def after_different_steps() -> bool:
        seen.append(engine.on_engine_thread(lambda: (threading.current_thread().name, stepping, steps)))
        return len({count for _, _, count in seen}) > 5

    running = engine.start(engine.answer(prompt(140, 40), greedy(1500), planned=False))
    until(after_different_steps, "calls have come between different steps")
    assert not running.done(), "else the calls came while nothing was computed"
    running.cancel()
    until(lambda: not engine.on_engine_thread(engine.scheduler.has_requests), "the cancelled request is gone")
    engine.on_engine_thread(lambda: setattr(core, "step_fn", step))

    assert {name for name, _, _ in seen} == {"crosskv-engine"}
    assert not any(inside for _, inside, _ in seen)
    assert_nothing_is_left(engine)


def test_a_started_engine_may_use_the_tile_registers(engine: LiveEngine) -> None:
    assert tiles_are_granted() == torch.cpu._is_amx_tile_supported()


def test_a_call_that_raises_harms_nobody(engine: LiveEngine) -> None:
    def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        engine.on_engine_thread(fail)
    assert len(engine.ask(prompt(150, 40))[0]) == 8


def test_what_vllm_refuses_is_the_callers_error(engine: LiveEngine) -> None:
    with pytest.raises(VLLMValidationError, match="longer than the maximum"):
        engine.run(engine.answer(prompt(151, 4000), greedy(8)))
    assert not engine.llm.errored


def test_an_engine_that_a_prompt_ends_names_it_refuses_everything_and_nothing_hangs(mortal_engine: LiveEngine) -> None:
    engine = mortal_engine
    die_of(engine.thread.core, None, DEADLY)
    running = [engine.start(engine.answer(prompt(160 + n, 40), greedy(2000))) for n in range(3)]
    until(lambda: engine.on_engine_thread(lambda: len(engine.scheduler.running)) == 3, "all are decoding")
    last = next(engine._ids)

    twice = SamplingParams(n=2, temperature=0.8, max_tokens=4)
    with pytest.raises(EngineDeadError):
        engine.run(engine.answer([*prompt(180, 40), *DEADLY, 1, 2], twice))

    assert engine.thread.crash_report.suspects() == [f"request-{last + 1}"], "and not those that were decoding"
    for request in running:
        with pytest.raises(EngineDeadError):
            request.result(patience(PATIENCE_S))
    assert engine.llm.errored
    assert "this prompt ends the engine" in str(engine.thread.error)
    with pytest.raises(EngineDeadError):
        engine.run(engine.answer(prompt(170, 40), greedy(8), planned=False))
    with pytest.raises(EngineDeadError):
        engine.on_engine_thread(lambda: None)
    with pytest.raises(EngineDeadError):
        engine.reuse.clear_device().result(patience(PATIENCE_S))
