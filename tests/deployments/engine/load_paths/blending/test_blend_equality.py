"""What is computed anew is what vLLM computes; what is reused is what was stored, moved; both are counted and named."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
from blended_prompts import ChunkedPrompt, answer_of, ask, chunked, device_kv, last_of, parts, store
from live_engine import BLOCK, LiveEngine

from configs.blending import DEFAULT_RECOMPUTE_RATIO
from deployments.engine.load_paths.blending import blend as blend_module
from deployments.engine.load_paths.blending.plan import TAIL_TOKENS, RequestBlend
from kernels.rope.shift import shift_keys
from kvmanager.extensions.blend.chunks import PlannedChunk
from kvmanager.moves.plan import PlannedLoad
from kvmanager.segments.format import read_header
from kvmanager.segments.keys import BLENDED, EXACT, TOLERANT, BlockHash, block_hashes
from load_tests.harness.engine import greedy, prompt
from load_tests.harness.memory_port import MemoryPort

CLOSE = 1e-5
SHAPES = {
    "unaligned": chunked(1, 37, [130, 257], 21),
    "aligned": chunked(2, 64, [128, 96], 40),
    "no head": chunked(3, 0, [200, 70], 5),
    "ends with a chunk": chunked(4, 10, [100, 97], 0),
}


def computed(engine: LiveEngine, one: ChunkedPrompt) -> tuple[list[int], torch.Tensor]:
    """The plain answer, and the KV of all its full blocks; nothing of it is left."""
    port, engine.port = engine.port, MemoryPort()
    answer, _ = engine.ask(one.tokens)
    kv = device_kv(engine, one.tokens, len(one.tokens) // BLOCK)
    engine.clear_device()
    engine.port = port
    return answer, kv


def blended_end(one: ChunkedPrompt) -> int:
    last = one.chunks[-1]
    return min(last.start + len(last) // BLOCK * BLOCK + TAIL_TOKENS, len(one.tokens) - 1) // BLOCK * BLOCK


@pytest.mark.parametrize(("behind", "end"), [(0, 3), (40, 5), (TAIL_TOKENS - 1, 11), (10 * TAIL_TOKENS, 12)])
def test_a_short_rest_of_the_prompt_is_taken_along_and_a_long_one_is_vllms(behind: int, end: int) -> None:
    """A chunk of 128 stored tokens, and what follows it. The prompt's last token is always vLLM's."""
    chunk = PlannedChunk(0, [PlannedLoad(b"key", 0, 4, "cpu", "node", 0)])
    blend = RequestBlend([chunk], ratio=0.15, check_layer=2, seconds=0.0)
    assert blend.end_block(0, (128 + behind - 1) // BLOCK, BLOCK) == end


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [32, 256, 512])
def test_computed_wholly_anew_it_is_what_vllm_computes(
    engine: LiveEngine, monkeypatch: pytest.MonkeyPatch, shape: str, rows: int
) -> None:
    monkeypatch.setattr(blend_module, "ROWS_PER_ITEM", rows)
    one = SHAPES[shape]
    store(engine, one)
    answer, kv = computed(engine, one)

    found = ask(engine, one, ratio=1.0, check_layer=1)

    assert found.tokens == answer
    assert found.cached == blended_end(one)
    assert found.usage["recomputed"] == len(one.tokens)
    assert (device_kv(engine, one.tokens, len(kv[0, 0]) // BLOCK, 1.0) - kv).abs().max() <= CLOSE


def test_without_any_chunk_there_all_is_computed_all_the_same(engine: LiveEngine) -> None:
    one = SHAPES["unaligned"]
    store(engine, one)
    answer, kv = computed(engine, one)
    plan = engine.blend_plan(one.tokens, one.chunks)
    engine.port.segments.clear()

    found = ask(engine, one, plan=plan)

    assert found.tokens == answer
    assert (found.blended, found.usage["recomputed"]) == (0, len(one.tokens))
    assert parts(engine).uncached == parts(engine).rows == blended_end(one)
    assert (device_kv(engine, one.tokens, len(kv[0, 0]) // BLOCK, DEFAULT_RECOMPUTE_RATIO) - kv).abs().max() <= CLOSE


def test_a_true_prefix_is_loaded_and_not_computed_again(engine: LiveEngine) -> None:
    one = chunked(5, 100, [100, 130], 30)
    store(engine, one)
    answer, kv = computed(engine, one)
    prefix = ChunkedPrompt(one.tokens[:140], [])
    ask(engine, prefix, 1.0, plan=engine.blend_plan(prefix.tokens, [], 1.0))  # its names are the blended prompt's own
    engine.clear_device()

    found = ask(engine, one, ratio=1.0)

    assert found.tokens == answer
    assert parts(engine).rows == blended_end(one) - 128, "the first chunk straddles the prefix"
    assert (found.usage["cpu"], found.blended) == (128, 0)
    assert (device_kv(engine, one.tokens, len(kv[0, 0]) // BLOCK, 1.0) - kv).abs().max() <= CLOSE
    engine.clear_device()
    engine.port.segments.clear()
    store(engine, one)
    ask(engine, prefix, 1.0, plan=engine.blend_plan(prefix.tokens, [], 1.0))
    assert ask(engine, one, ratio=1.0).usage["device"] == 128, "and what the device has is not even loaded"
    assert (device_kv(engine, one.tokens, len(kv[0, 0]) // BLOCK, 1.0) - kv).abs().max() <= CLOSE


def test_nothing_computed_anew_it_is_the_stored_kv_moved_to_where_the_chunk_stands(engine: LiveEngine) -> None:
    one = SHAPES["unaligned"]
    store(engine, one)
    _, whole = computed(engine, one)
    alone = [computed(engine, ChunkedPrompt(one.tokens[chunk.start : chunk.stop], []))[1] for chunk in one.chunks]

    found = ask(engine, one, ratio=0.0, check_layer=2)

    end, model = blended_end(one), engine.reuse.paths["blend"]._tools
    assert model is not None
    kv = device_kv(engine, one.tokens, end // BLOCK, 0.0)
    taken = torch.zeros(end, dtype=torch.bool)
    for chunk, stored in zip(one.chunks, alone, strict=True):
        stop = min(chunk.start + stored.shape[2], end)
        taken[chunk.start : stop] = True
        for layer in range(3, kv.shape[0]):
            keys = stored[layer, 0, : stop - chunk.start].clone()
            shift_keys(keys, chunk.start, model.model._inv_freq[layer], "neox")
            assert (kv[layer, 0, chunk.start : stop] - keys).abs().max() <= CLOSE
            assert torch.equal(kv[layer, 1, chunk.start : stop], stored[layer, 1, : stop - chunk.start])
    assert (kv[:3] - whole[:3, :, :end]).abs().max() <= CLOSE, "up to the check layer all is the prompt's own"
    assert found.blended == int(taken.sum()) == found.usage["cpu"]
    assert sum(found.usage.values()) == len(one.tokens)


def test_the_four_counts_add_up_and_the_rows_that_were_chosen_count_as_computed(engine: LiveEngine) -> None:
    one = SHAPES["unaligned"]
    store(engine, one)
    rows = dict(engine.reuse.paths["blend"].counters.rows)

    found = ask(engine, one, ratio=0.15)

    took = parts(engine)
    assert took.reused == 128 + 249
    assert took.selected == round(0.15 * took.reused)
    assert found.blended == found.usage["cpu"] == took.reused - took.selected
    assert sum(found.usage.values()) == len(one.tokens)
    counted = engine.reuse.paths["blend"].counters.rows
    assert counted["selected"] - rows.get("selected", 0) == took.selected
    assert counted["uncached"] - rows.get("uncached", 0) == took.uncached == 416 - took.reused


def test_what_is_saved_has_the_prompts_own_blended_names_and_says_so(engine: LiveEngine) -> None:
    one = SHAPES["unaligned"]
    store(engine, one)
    before = set(engine.port.segments)

    found = ask(engine, one)

    own = set(block_hashes(one.tokens + found.tokens, BLOCK, engine.blended_salt()))
    saved = set(engine.port.segments) - before
    assert saved
    assert saved <= own
    assert {read_header(engine.port.segments[key][1]).fidelity for key in saved} == {BLENDED}
    again, by_tier = engine.ask(one.tokens)
    assert by_tier["recomputed"] == len(one.tokens), "an exact prompt finds nothing of it"
    assert again == computed(engine, one)[0]
    assert ask(engine, one, plan=engine.blend_plan(one.tokens, [])).usage["cpu"] >= blended_end(one)


def test_what_a_lower_ratio_left_is_read_by_no_prompt_of_a_higher_one(engine: LiveEngine) -> None:
    """Neither on the device nor in the tier; its own ratio finds it at both."""
    one = SHAPES["unaligned"]
    store(engine, one)
    answer, _ = computed(engine, one)
    engine.clear_device()
    ask(engine, one, ratio=0.0)

    on_device = ask(engine, one, ratio=1.0)
    engine.clear_device()
    assert ask(engine, one, ratio=0.0).usage["cpu"] >= blended_end(one), "its own"
    engine.port.segments = {
        key: kept for key, kept in engine.port.segments.items() if key not in own_names(engine, one)
    }
    engine.clear_device()
    in_tier = ask(engine, one, ratio=1.0)

    assert on_device.tokens == in_tier.tokens == answer
    assert on_device.usage["recomputed"] == in_tier.usage["recomputed"] == len(one.tokens)


def own_names(engine: LiveEngine, one: ChunkedPrompt) -> set[BlockHash]:
    """Those of a prompt that is computed whole."""
    return set(block_hashes(one.tokens, BLOCK, engine.blended_salt(1.0)))


def test_a_chunk_that_the_device_has_already_is_not_blended(engine: LiveEngine) -> None:
    one = SHAPES["unaligned"]
    store(engine, one)
    first = ask(engine, one)
    blends = engine.reuse.paths["blend"].counters.outcomes["done"]

    second = ask(engine, one)

    assert engine.reuse.paths["blend"].counters.outcomes["done"] == blends
    assert second.tokens == first.tokens
    assert second.usage["device"] == (len(one.tokens) - 1) // BLOCK * BLOCK


@pytest.mark.parametrize("fidelity", [EXACT, TOLERANT])
def test_prompts_of_another_fidelity_blend_nothing_whatever_their_plan_says(engine: LiveEngine, fidelity: str) -> None:
    one = SHAPES["unaligned"]
    store(engine, one)
    answer, _ = computed(engine, one)
    refused = engine.reuse.paths["blend"].counters.outcomes["refused_fidelity"]

    found = ask(engine, one, fidelity=fidelity)  # type: ignore[arg-type]

    assert found.tokens == answer
    assert (found.blended, found.cached) == (0, 0)
    assert engine.reuse.paths["blend"].counters.outcomes["refused_fidelity"] == refused + 1


def test_a_prompt_whose_logprobs_are_wanted_is_computed(engine: LiveEngine) -> None:
    one = SHAPES["aligned"]
    store(engine, one)
    refused = engine.reuse.paths["blend"].counters.outcomes["refused_request"]
    assert ask(engine, one, prompt_logprobs=0, max_tokens=1).usage["recomputed"] == len(one.tokens)
    assert engine.reuse.paths["blend"].counters.outcomes["refused_request"] == refused + 1


def test_several_blends_at_once_beside_others_that_decode_change_no_token(engine: LiveEngine) -> None:
    several = [chunked(20 + number, 20 + 7 * number, [100, 70], 20) for number in range(3)]
    neighbours = [prompt(800 + number, 50) for number in range(2)]
    wanted = [computed(engine, one)[0] for one in several]
    alone = [engine.ask(tokens, max_tokens=40)[0] for tokens in neighbours]
    for one in several:
        store(engine, one)
    plans = [engine.blend_plan(one.tokens, one.chunks, 1.0, 1) for one in several]

    async def together() -> list[list[int]]:
        blends = [
            last_of(engine.blended(one.tokens, greedy(8), plan)) for one, plan in zip(several, plans, strict=True)
        ]
        others = [engine.answer(tokens, greedy(40), planned=False) for tokens in neighbours]
        outputs = await asyncio.gather(*others, *blends)
        return [list(output.outputs[0].token_ids) for output in outputs]

    done = engine.reuse.paths["blend"].counters.outcomes["done"]
    answers = engine.run(together())
    engine.settle()
    assert answers == alone + wanted
    assert engine.reuse.paths["blend"].counters.outcomes["done"] == done + 3


def test_equal_prompts_at_once_are_blended_once(engine: LiveEngine) -> None:
    one = SHAPES["unaligned"]
    store(engine, one)
    plan = engine.blend_plan(one.tokens, one.chunks)

    async def together() -> list[list[int]]:
        outputs = await asyncio.gather(*(last_of(engine.blended(one.tokens, greedy(4), plan)) for _ in range(3)))
        return [answer_of(output).tokens for output in outputs]

    done = engine.reuse.paths["blend"].counters.outcomes["done"]
    answers = engine.run(together())
    engine.settle()
    assert answers[0] == answers[1] == answers[2]
    assert engine.reuse.paths["blend"].counters.outcomes["done"] == done + 1


def test_how_long_it_took_is_told_to_whom_had_estimated_it_and_counted(engine: LiveEngine) -> None:
    one = SHAPES["unaligned"]
    store(engine, one)
    ask(engine, one, plan=engine.blend_plan(one.tokens, one.chunks, seconds=1.5))
    ((kind, expected, seconds),) = [rate for rate in engine.port.rates if rate[0] == "blend"]
    assert (kind, expected) == ("blend", 1.5)
    assert seconds > 0
    engine.clear_device()
    engine.port.rates.clear()
    ask(engine, one, plan=engine.blend_plan(one.tokens, one.chunks, seconds=0.0))
    assert [rate for rate in engine.port.rates if rate[0] == "blend"] == [], "nobody had estimated it"
    families = {family.name for family in engine.reuse.paths["blend"].counters.registry.collect()}
    assert families == {
        "crosskv_blend_seconds", "crosskv_blends", "crosskv_blend_rows", "crosskv_blending_available",
    }  # fmt: skip
