"""Layer by layer: the engine computes while later layers are on their way, and whatever happens to a layer, the request
ends with the tokens that plain computation gives, and nobody finds in the prefix cache what is not there."""

from __future__ import annotations

import asyncio
import inspect
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import vllm
from layer_port import LAYERS, LENGTH, LayerPort, forget_device, in_one_step, plain, tokens_of
from live_engine import BLOCK, PATIENCE_S, LiveEngine, usage
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorBase_V1
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.worker.gpu_model_runner import GPUModelRunner

from kvmanager.segments.format import read_header
from load_tests.harness.engine import greedy, prompt
from load_tests.harness.memory_port import LEASE_ID
from load_tests.harness.patience import patience, until


@pytest.fixture
def stored(layerwise: LiveEngine, request: pytest.FixtureRequest) -> tuple[list[int], list[int]]:
    """A prompt that only the port holds, a different one per test, and its answer."""
    tokens = prompt(sum(ord(letter) * (position + 3) for position, letter in enumerate(request.node.name)), LENGTH)
    answer, _ = layerwise.ask(tokens)
    forget_device(layerwise)
    return tokens, answer


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (BlockPool.cache_full_blocks, ["request", "blocks", "num_cached_blocks", "num_full_blocks", "block_size"]),
        (KVConnectorBase_V1.wait_for_layer_load, ["layer_name"]),
        (KVConnectorBase_V1.save_kv_layer, ["layer_name", "kv_layer", "attn_metadata"]),
        (Scheduler._update_requests_with_invalid_blocks, ["requests", "invalid_block_ids", "num_scheduled_tokens"]),
    ],
    ids=lambda value: getattr(value, "__qualname__", ""),
)
def test_vllm_has_what_layerwise_transfer_leans_on(function: Callable[..., Any], expected: list[str]) -> None:
    found = [name for name in inspect.signature(function).parameters if name != "self"]
    assert found[: len(expected)] == expected, f"vllm {vllm.__version__} changed {function.__qualname__}"
    assert "num_output_tokens < len(req_state.output_token_ids)" in inspect.getsource(GPUModelRunner._update_states)


def test_a_prompt_comes_layer_by_layer_and_its_answer_is_the_same(
    layerwise: LiveEngine, stored: tuple[list[int], list[int]]
) -> None:
    tokens, answer = stored
    loads, failed = layerwise.transfer.counters.loads_layerwise, layerwise.transfer.counters.loads_failed

    again, by_tier = layerwise.ask(tokens)

    assert again == answer
    assert by_tier == {"device": 0, "cpu": 480, "redis": 0, "recomputed": 20}
    assert layerwise.transfer.counters.loads_layerwise == loads + 1
    assert layerwise.transfer.counters.loads_failed == failed
    assert layerwise.port.arrivals == [(segment, group) for group in range(LAYERS) for segment in range(4)]
    assert layerwise.ask(tokens) == (answer, {"device": 480, "cpu": 0, "redis": 0, "recomputed": 20})


def test_the_engine_computes_a_layer_before_the_next_has_come(
    layerwise: LiveEngine, stored: tuple[list[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, answer = stored
    step = layerwise.reuse.layerwise
    asked_for = [threading.Event() for _ in range(LAYERS)]
    wait_for_layer = step.wait_for_layer

    def note(layer: int) -> None:
        asked_for[layer].set()
        wait_for_layer(layer)

    def group_comes_when_its_layer_is_needed(segment: int, group: int) -> None:
        assert asked_for[group].wait(patience(PATIENCE_S))

    monkeypatch.setattr(step, "wait_for_layer", note)
    layerwise.port.before_group = group_comes_when_its_layer_is_needed

    again, by_tier = layerwise.ask(tokens)

    assert (again, by_tier["cpu"]) == (answer, 480)
    waited = [layer.wait_ms for layer in step.times.layers]
    assert all(ms > 0 for ms in waited)


@pytest.mark.parametrize(("segment", "layer", "blocks"), [(0, 0, 0), (2, 3, 8), (3, 5, 12)])
def test_a_damaged_layer_costs_a_recompute_and_is_reported(
    layerwise: LiveEngine, stored: tuple[list[int], list[int]], segment: int, layer: int, blocks: int
) -> None:
    tokens, answer = stored
    before = set(layerwise.port.segments)
    layerwise.port.damaged = {(segment, layer)}

    again, by_tier = layerwise.ask(tokens)

    assert again == answer
    assert by_tier == {"device": 0, "cpu": blocks * BLOCK, "redis": 0, "recomputed": LENGTH - blocks * BLOCK}
    assert layerwise.port.bad == ["checksum"]
    assert layerwise.port.layer_fetches == 1, "not a second time"
    assert set(layerwise.port.segments) == before, "the segment that was refused is stored anew"
    assert layerwise.ask(tokens) == (answer, {"device": 480, "cpu": 0, "redis": 0, "recomputed": 20}), (
        "what was computed anew is on the device"
    )
    forget_device(layerwise)
    layerwise.port.damaged = set()
    assert layerwise.ask(tokens) == (answer, {"device": 0, "cpu": 480, "redis": 0, "recomputed": 20}), (
        "what was stored anew is good"
    )


def test_an_answer_goes_on_into_further_blocks_after_a_failed_load(layerwise: LiveEngine) -> None:
    """The block after the load is let into the prefix cache by vLLM, when the answer fills it, and by nobody else."""
    tokens = prompt(951, LENGTH)
    layerwise.ask(tokens)
    expected = layerwise.run(layerwise.answer(tokens, greedy(2 * BLOCK), planned=False))
    forget_device(layerwise)
    layerwise.port.damaged = {(2, 3)}

    output = layerwise.run(layerwise.answer(tokens, greedy(2 * BLOCK)))
    layerwise.settle()

    assert layerwise.port.bad == ["checksum"]
    assert tokens_of(output) == tokens_of(expected)
    all_tokens = [*tokens, *tokens_of(output)]
    on_device = set(layerwise.on_engine_thread(layerwise.reuse.control.cached_hashes))
    assert set(layerwise.hashes(all_tokens)[: (len(all_tokens) - 1) // BLOCK]) <= on_device


def test_a_segment_that_is_gone_is_recomputed(layerwise: LiveEngine, stored: tuple[list[int], list[int]]) -> None:
    tokens, answer = stored
    gone = layerwise.hashes(tokens)[7]

    plan_of_all = layerwise.port.plan(layerwise.hashes(tokens), used=False)
    layerwise.port.plan = lambda hashes, used=True: plan_of_all
    del layerwise.port.segments[gone]

    again, by_tier = layerwise.ask(tokens)

    assert again == answer
    assert by_tier["cpu"] == 4 * BLOCK


def test_a_tier_that_fails_in_the_middle_costs_a_recompute(
    layerwise: LiveEngine, stored: tuple[list[int], list[int]]
) -> None:
    tokens, answer = stored

    def fail(segment: int, group: int) -> None:
        if (segment, group) == (1, 4):
            raise OSError("the tier is gone")

    layerwise.port.before_group = fail
    again, by_tier = layerwise.ask(tokens)

    assert (again, by_tier["recomputed"]) == (answer, LENGTH)


def test_layers_that_come_after_the_deadline_are_recomputed_and_written_nowhere(
    layerwise: LiveEngine, stored: tuple[list[int], list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens, answer = stored
    gate, late = threading.Event(), threading.Event()

    def stall(segment: int, group: int) -> None:
        if (segment, group) == (2, 3):
            assert gate.wait(patience(PATIENCE_S))
        if (segment, group) == (2, 4):
            late.set()

    layerwise.port.before_group = stall
    layerwise.port.damaged = {(2, 3)}  # would be noticed, if it were looked at
    monkeypatch.setattr(layerwise.scheduler.connector._scheduler_side, "_load_deadline_s", 0.3)

    output = layerwise.run(layerwise.answer(tokens, greedy(8)))
    gate.set()
    layerwise.settle()

    assert tokens_of(output) == answer
    assert usage(output)["recomputed"] == LENGTH
    assert layerwise.port.bad == []
    assert not late.is_set(), "the load ends when nobody wants more"
    assert layerwise.ask(tokens)[0] == answer


def test_a_request_aborted_while_its_layers_come_leaves_nothing_behind(
    layerwise: LiveEngine, stored: tuple[list[int], list[int]]
) -> None:
    tokens, answer = stored
    released = list(layerwise.port.released)
    reached, gate = threading.Event(), threading.Event()

    def stall(segment: int, group: int) -> None:
        if (segment, group) == (1, 2):
            reached.set()
            assert gate.wait(patience(PATIENCE_S))

    layerwise.port.before_group = stall
    waiting = layerwise.start(layerwise.answer(tokens, greedy(8)))
    assert reached.wait(patience(PATIENCE_S))
    layerwise.run(asyncio.sleep(0.01))  # vLLM's front knows the request now, and can abort it
    waiting.cancel()
    gate.set()
    until(lambda: layerwise.on_engine_thread(layerwise.scheduler.get_num_unfinished_requests) == 0, "aborted")
    layerwise.settle()

    assert layerwise.blocks_in_use() == 0
    assert set(layerwise.port.released[len(released) :]) == {LEASE_ID}
    layerwise.port.before_group = lambda segment, group: None
    assert layerwise.ask(tokens)[0] == answer


@pytest.mark.parametrize("tail", [20, 90], ids=["short rest", "rest of more than a block"])
def test_what_a_failed_and_aborted_request_computed_is_found_by_nobody(layerwise: LiveEngine, tail: int) -> None:
    """vLLM caches a request's blocks when it allocates them, and leaves them there when the load into them fails."""
    tokens = prompt(900 + tail, 480 + tail)
    layerwise.ask(tokens[:480])
    expected = plain(layerwise, tokens)
    connector = layerwise.scheduler.connector
    request_ids: list[str] = []
    layerwise.port.damaged = {(1, 5)}

    def abort_right_after_this_step(segment: int, group: int) -> None:
        if (segment, group) == (0, 0):
            request_ids.extend(connector._scheduler_side._tracked)
            layerwise.thread.call(lambda: layerwise.thread.core.abort_requests(request_ids))

    layerwise.port.before_group = abort_right_after_this_step
    waiting = layerwise.start(layerwise.answer(tokens, greedy(8)))
    until(lambda: bool(request_ids), "the load has begun")
    layerwise.settle()
    waiting.cancel()
    layerwise.port.before_group = lambda segment, group: None
    layerwise.port.damaged = set()

    on_device = set(layerwise.on_engine_thread(layerwise.reuse.control.cached_hashes))
    assert set(layerwise.hashes(tokens)[:4]) <= on_device, "what arrived stays"
    assert not on_device & set(layerwise.hashes(tokens)[4:])
    output = layerwise.run(layerwise.answer(tokens, greedy(8), planned=False))
    assert tokens_of(output) == expected
    assert usage(output)["device"] == 4 * BLOCK


def test_two_requests_in_one_step_of_which_one_is_damaged(layerwise: LiveEngine) -> None:
    first, second = prompt(811, LENGTH), prompt(812, LENGTH - 60)
    answers = [layerwise.ask(first)[0], layerwise.ask(second)[0]]
    forget_device(layerwise)
    loads = layerwise.transfer.counters.loads_layerwise
    bad_key = layerwise.hashes(first)[7]
    span, sealed = layerwise.port.segments[bad_key]
    layerwise.port.segments[bad_key] = (span, sealed[:-5] + bytes([sealed[-5] ^ 1]) + sealed[-4:])

    outputs = in_one_step(layerwise, layerwise.answer(first, greedy(8)), layerwise.answer(second, greedy(8)))
    layerwise.settle()

    assert [tokens_of(output) for output in outputs] == answers
    assert [usage(output)["cpu"] for output in outputs] == [4 * BLOCK, 13 * BLOCK]
    assert layerwise.transfer.counters.loads_layerwise == loads + 2


def test_twins_in_one_step_do_not_share_what_is_only_being_loaded(
    layerwise: LiveEngine, stored: tuple[list[int], list[int]]
) -> None:
    tokens, answer = stored
    layerwise.port.damaged = {(1, 5)}

    outputs = in_one_step(
        layerwise,
        layerwise.answer(tokens, greedy(8)),
        layerwise.answer(tokens, greedy(8), planned=False),
    )
    layerwise.settle()

    assert [tokens_of(output) for output in outputs] == [answer, answer]
    assert usage(outputs[1])["device"] == 0


def test_a_request_that_decodes_beside_a_layerwise_load_gets_its_own_tokens(
    layerwise: LiveEngine, stored: tuple[list[int], list[int]]
) -> None:
    tokens, answer = stored
    other = prompt(70, 100)
    expected = tokens_of(layerwise.run(layerwise.answer(other, greedy(40), planned=False)))
    forget_device(layerwise)
    layerwise.port.damaged = {(0, 2)}

    decoding = layerwise.start(layerwise.answer(other, greedy(40), planned=False))
    again, _ = layerwise.ask(tokens)

    assert again == answer
    assert tokens_of(decoding.result(patience(PATIENCE_S))) == expected


def test_a_prompt_of_several_steps_waits_for_its_layers_in_the_first(layerwise: LiveEngine) -> None:
    tokens = prompt(813, 1500)  # steps of 512 tokens
    expected = plain(layerwise, tokens)
    layerwise.ask(tokens[:500])
    forget_device(layerwise)

    again, by_tier = layerwise.ask(tokens)

    assert (again, by_tier["cpu"]) == (expected, 480)


def test_what_a_step_computes_is_saved_while_it_is_computed(
    layerwise: LiveEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = prompt(814, LENGTH)
    layerwise.ask(tokens)
    expected = layerwise.port.segments
    forget_device(layerwise)
    layerwise.port = LayerPort()
    free_bytes = layerwise.reuse.layerwise.buffer.free_bytes
    stored_after_step = []
    end_step = layerwise.reuse.layerwise.end_step

    def note() -> set[int]:
        failed = end_step()
        until(layerwise.transfer.is_idle, "what the step computed is saved before the next one begins")
        stored_after_step.append(len(layerwise.port.offered))
        return failed

    monkeypatch.setattr(layerwise.reuse.layerwise, "saves", True)
    monkeypatch.setattr(layerwise.reuse.layerwise, "end_step", note)
    layerwise.ask(tokens, max_tokens=4)

    assert stored_after_step[0] == 4, "offered in the step that computed them"
    assert layerwise.port.segments == expected
    assert len(layerwise.port.offered) == 4, "and not a second time"
    assert layerwise.reuse.layerwise.buffer.free_bytes == free_bytes


def test_nothing_is_saved_of_a_step_that_does_not_count(layerwise: LiveEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = prompt(815, 800)
    answer, _ = layerwise.ask(tokens)
    expected = dict(layerwise.port.segments)
    kept = {key: each for key, each in expected.items() if each[0].end_block <= 8}
    forget_device(layerwise)
    layerwise.port.segments = dict(kept)
    layerwise.port.damaged = {(1, 0)}
    monkeypatch.setattr(layerwise.reuse.layerwise, "saves", True)

    again, by_tier = layerwise.ask(tokens)

    assert (again, by_tier["cpu"]) == (answer, 4 * BLOCK)
    assert set(layerwise.port.segments) == set(expected)
    for key, (_, sealed) in expected.items():
        now = layerwise.port.segments[key][1]
        kv, right = (np.frombuffer(data, np.float32, offset=read_header(sealed).body_offset) for data in (now, sealed))
        np.testing.assert_allclose(kv, right, atol=1e-4)
    layerwise.port.damaged = set()
    forget_device(layerwise)
    again, by_tier = layerwise.ask(tokens)
    assert (again, by_tier["cpu"]) == (answer, 24 * BLOCK), "what is stored is right"
