"""The engine on a thread of this process behaves as vLLM's own three processes do; the last test kills it."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from live_engine import PATIENCE_S, LiveEngine, greedy, prompt, until
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.request import RequestStatus


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


@pytest.mark.parametrize("how", ["cancel", "close"])
def test_a_client_that_leaves_aborts_the_request_and_frees_its_blocks(
    engine: LiveEngine, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    ends: list[RequestStatus] = []
    finished = engine.scheduler.connector.request_finished

    def watch(request: Any, block_ids: list[int]) -> Any:
        ends.append(request.status)
        return finished(request, block_ids)

    monkeypatch.setattr(engine.scheduler.connector, "request_finished", watch)

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
    engine.settle()

    assert ends == [RequestStatus.FINISHED_ABORTED]
    assert engine.llm.get_num_unfinished_requests() == 0
    assert engine.scheduler.requests == {}
    assert engine.blocks_in_use() == 0


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
    running = engine.start(engine.answer(prompt(140, 40), greedy(60), planned=False))
    seen: list[tuple[str, bool, int]] = []
    while not running.done():
        seen.append(engine.on_engine_thread(lambda: (threading.current_thread().name, stepping, steps)))
    engine.on_engine_thread(lambda: setattr(core, "step_fn", step))

    assert len(running.result().outputs[0].token_ids) == 60
    assert {name for name, _, _ in seen} == {"crosskv-engine"}
    assert not any(inside for _, inside, _ in seen)
    assert len({count for _, _, count in seen}) > 5, "the calls came between different steps"


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


def test_a_dead_engine_refuses_everything_and_nothing_hangs(engine: LiveEngine) -> None:
    running = [engine.start(engine.answer(prompt(160 + n, 40), greedy(2000))) for n in range(3)]
    until(lambda: engine.on_engine_thread(lambda: len(engine.scheduler.running)) == 3, "all are decoding")

    def fail() -> Any:
        raise RuntimeError("out of memory")

    engine.on_engine_thread(lambda: setattr(engine.thread.core, "step_fn", fail))

    for request in running:
        with pytest.raises(EngineDeadError):
            request.result(PATIENCE_S)
    assert engine.llm.errored
    assert str(engine.thread.error) == "out of memory"
    with pytest.raises(EngineDeadError):
        engine.run(engine.answer(prompt(170, 40), greedy(8), planned=False))
    with pytest.raises(EngineDeadError):
        engine.on_engine_thread(lambda: None)
    with pytest.raises(EngineDeadError):
        engine.reuse.clear_device().result(PATIENCE_S)
