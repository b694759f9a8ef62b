"""What is stored is what is loaded: the connector with a real engine, in float32, where reuse must not move a token."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import numpy as np
import pytest
from live_engine import BLOCK, PATIENCE_S, SEGMENT_BLOCKS, LiveEngine, usage
from vllm import SamplingParams

from kvmanager.segments.format import read_header
from kvmanager.segments.spans import NodeKind
from load_tests.harness.engine import greedy, prompt
from load_tests.harness.memory_port import MemoryPort
from load_tests.harness.patience import patience, until


def spans(port: MemoryPort) -> list[tuple[int, int, NodeKind]]:
    return sorted(
        ((span.start_block, span.num_blocks, span.kind) for span, _ in port.segments.values()),
        key=lambda span: span[:2],
    )


def test_a_prompt_that_left_the_device_comes_back_from_the_tier_with_the_same_tokens(engine: LiveEngine) -> None:
    tokens = prompt(1, 400)
    computed, first_usage = engine.ask(tokens)
    assert first_usage == {"device": 0, "cpu": 0, "redis": 0, "recomputed": 400}

    engine.clear_device()
    loaded, second_usage = engine.ask(tokens)

    assert loaded == computed
    assert second_usage == {"device": 0, "cpu": 384, "redis": 0, "recomputed": 16}


def test_the_end_of_a_load_and_a_new_request_wake_an_engine_that_waits(
    engine: LiveEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(18, 400)
    answer, _ = engine.ask(tokens)
    engine.clear_device()
    reached, gate = threading.Event(), threading.Event()

    def stall() -> None:
        reached.set()
        assert gate.wait(patience(PATIENCE_S))

    engine.port.before_fetch = stall
    monkeypatch.setattr("deployments.engine.host.IDLE_STEP_EVERY_S", 10 * PATIENCE_S)
    loading = engine.start(engine.answer(tokens, greedy(8)))
    assert reached.wait(patience(PATIENCE_S))
    assert engine.run(engine.answer(prompt(19, 40), greedy(2), planned=False)).finished
    gate.set()
    output = loading.result(patience(PATIENCE_S))
    assert list(output.outputs[0].token_ids) == answer
    assert usage(output)["cpu"] == 384


def test_what_the_device_still_holds_is_not_loaded(engine: LiveEngine) -> None:
    tokens = prompt(2, 400)
    engine.ask(tokens[:200])
    engine.clear_device()
    engine.ask(tokens)
    engine.clear_device()
    engine.ask(tokens[:170])  # five blocks, from the tier
    loaded_bytes = engine.transfer.counters.bytes_loaded

    answer, by_tier = engine.ask(tokens)

    assert by_tier == {"device": 160, "cpu": 224, "redis": 0, "recomputed": 16}
    assert engine.transfer.counters.bytes_loaded > loaded_bytes
    engine.clear_device()
    engine.port = MemoryPort()
    assert engine.ask(tokens)[0] == answer


def test_a_prompt_of_whole_blocks_computes_its_last_block(engine: LiveEngine) -> None:
    tokens = prompt(3, 8 * BLOCK)
    computed, _ = engine.ask(tokens)
    engine.clear_device()

    loaded, by_tier = engine.ask(tokens)

    assert loaded == computed
    assert by_tier == {"device": 0, "cpu": 7 * BLOCK, "redis": 0, "recomputed": BLOCK}


def test_prompt_and_answer_are_saved_as_different_kinds(engine: LiveEngine) -> None:
    engine.ask(prompt(4, 200), max_tokens=150)  # 6 full blocks of prompt; 349 tokens with KV: 10 full blocks

    assert spans(engine.port) == [
        (0, 4, NodeKind.REQUEST),
        (4, 2, NodeKind.REQUEST),
        (6, 2, NodeKind.ANSWER),
        (8, 2, NodeKind.ANSWER),
    ]
    assert len(engine.port.offered) == 4, "each is offered once"


@pytest.mark.parametrize(("answer_tokens", "stored_blocks"), [(32, 4), (33, 5)])
def test_the_last_sampled_token_has_no_kv_and_its_block_is_not_stored(
    engine: LiveEngine, answer_tokens: int, stored_blocks: int
) -> None:
    engine.ask(prompt(5, 4 * BLOCK), max_tokens=answer_tokens)  # with 32 tokens block 5 is full but for its KV

    assert sum(blocks for _, blocks, _ in spans(engine.port)) == stored_blocks


def test_the_next_turn_reuses_the_answer_of_the_first(engine: LiveEngine) -> None:
    question = prompt(6, 200)
    answer, _ = engine.ask(question, max_tokens=150)
    turn = question + answer + prompt(60, 50)
    engine.clear_device()

    reused, by_tier = engine.ask(turn)

    assert by_tier == {"device": 0, "cpu": 10 * BLOCK, "redis": 0, "recomputed": 400 - 10 * BLOCK}
    engine.clear_device()
    engine.port = MemoryPort()
    assert engine.ask(turn)[0] == reused


def test_two_sampled_answers_hang_under_one_request(engine: LiveEngine) -> None:
    tokens = prompt(7, 4 * BLOCK)
    for seed in (1, 2):
        engine.run(engine.answer(tokens, SamplingParams(temperature=2.0, seed=seed, max_tokens=70, ignore_eos=True)))
        engine.settle()

    stored = [span for span, _ in engine.port.segments.values()]
    requests = [span for span in stored if span.kind is NodeKind.REQUEST]
    answers = [span for span in stored if span.kind is NodeKind.ANSWER]
    assert len(requests) == 1
    assert len(answers) == 2
    assert {span.parent for span in answers} == {requests[0].key}


def test_two_answers_to_one_request_are_what_two_requests_give(engine: LiveEngine) -> None:
    tokens = prompt(8, 300)

    def sampled(seed: int, n: int) -> SamplingParams:
        return SamplingParams(temperature=1.0, seed=seed, n=n, max_tokens=12, ignore_eos=True)

    async def answers(params: SamplingParams) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        async for output in engine.stream(tokens, params):
            found.update({answer.index: list(answer.token_ids) for answer in output.outputs})
        return found

    alone = [engine.run(answers(sampled(seed, 1)))[0] for seed in (5, 6)]
    engine.settle()
    engine.clear_device()

    assert engine.run(answers(sampled(5, 2))) == {0: alone[0], 1: alone[1]}
    assert alone[0] != alone[1]


def test_one_prefix_of_two_concurrent_requests_is_stored_once(engine: LiveEngine) -> None:
    common = prompt(9, 8 * BLOCK)
    stored: list[bytes] = []
    engine.port.on_store = stored.append

    async def both() -> None:
        await asyncio.gather(*(engine.answer(common + prompt(seed, 40), greedy(8)) for seed in (91, 92)))

    engine.run(both())
    engine.settle()

    assert len(stored) == len(set(stored))
    assert set(engine.hashes(common)[SEGMENT_BLOCKS - 1 :: SEGMENT_BLOCKS]) <= set(stored)


def test_segments_saved_from_loaded_blocks_are_the_bytes_that_were_loaded(engine: LiveEngine) -> None:
    tokens = prompt(10, 400)
    engine.ask(tokens)
    original = {key: sealed for key, (_, sealed) in engine.port.segments.items()}
    engine.clear_device()
    engine.ask(tokens)  # loads

    engine.port = MemoryPort()
    engine.ask(tokens)  # finds all on the device, stores it under the new port

    again = {key: sealed for key, (_, sealed) in engine.port.segments.items()}
    assert again == original
    assert len(original) == 3


def test_computing_a_prompt_again_gives_the_same_bytes(engine: LiveEngine) -> None:
    tokens = prompt(11, 400)
    engine.ask(tokens)
    original = engine.port.segments
    engine.clear_device()
    engine.port = MemoryPort()

    engine.ask(tokens)

    assert engine.port.segments == original


def test_prompt_logprobs_are_complete_although_the_prefix_is_stored(engine: LiveEngine) -> None:
    tokens = prompt(12, 300)

    def ask() -> Any:
        return engine.run(engine.answer(tokens, greedy(4, prompt_logprobs=0)))

    computed = ask()
    engine.settle()
    again = ask()

    assert len(again.prompt_logprobs) == 300
    for before, after in zip(computed.prompt_logprobs[1:], again.prompt_logprobs[1:], strict=True):
        assert {token: value.logprob for token, value in before.items()} == {
            token: value.logprob for token, value in after.items()
        }
    assert again.outputs[0].token_ids == computed.outputs[0].token_ids
    assert usage(again) == {"device": 0, "cpu": 0, "redis": 0, "recomputed": 300}


def test_requests_with_different_salts_share_nothing(engine: LiveEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = prompt(13, 300)
    answer, _ = engine.ask(tokens)
    stored = set(engine.port.segments)
    monkeypatch.setattr(engine, "salt", "another tenant's")

    again, by_tier = engine.ask(tokens)

    assert again == answer
    assert by_tier["recomputed"] == 300
    assert len(engine.port.segments) == 2 * len(stored)


def test_the_device_pool_is_reported_as_it_is(engine: LiveEngine) -> None:
    tokens = prompt(14, 300)
    engine.ask(tokens)
    assert set(engine.hashes(tokens)) <= engine.port.on_device
    assert set(engine.on_engine_thread(engine.reuse.control.cached_hashes)) == engine.port.on_device

    engine.clear_device()

    assert engine.port.on_device == set()


def test_blocks_that_another_request_of_the_same_step_is_about_to_compute_are_not_saved_yet(
    engine: LiveEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM lets a request hit blocks that are computed only in the step that admits it: nothing to be stored yet."""
    tokens = prompt(77, 200)
    executor = engine.thread.core.model_executor
    compute = executor.execute_model

    def compute_after_all_saves(*args: Any, **options: Any) -> Any:
        until(engine.transfer.is_idle, "what was submitted before this step is copied")
        return compute(*args, **options)

    monkeypatch.setattr(executor, "execute_model", compute_after_all_saves)
    held, both_are_waiting = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        both_are_waiting.wait()

    engine.thread.call(hold)
    held.wait(patience(PATIENCE_S))  # else this call would be counted among those that wait
    twins = [engine.start(engine.answer(tokens, greedy(4))) for _ in range(2)]
    until(lambda: engine.thread._inbox.qsize() >= 2, "both requests wait for the same step")
    both_are_waiting.set()
    answers = [list(twin.result(patience(PATIENCE_S)).outputs[0].token_ids) for twin in twins]
    engine.settle()
    together = engine.port.segments

    engine.clear_device()
    engine.port = MemoryPort()
    alone, _ = engine.ask(tokens, max_tokens=4)

    assert answers == [alone, alone]
    assert {key for key in engine.port.segments if key in together} == set(engine.port.segments)
    for key, (_, sealed) in engine.port.segments.items():
        start = read_header(sealed).body_offset
        kv, expected = (np.frombuffer(data, np.float32, offset=start) for data in (together[key][1], sealed))
        np.testing.assert_allclose(kv, expected, atol=1e-4)
