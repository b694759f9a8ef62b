"""An fp8 KV cache: what was stored is the cold answer's KV bit by bit, in a fresh engine too, and damage is found."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from live_engine import BLOCK, PATIENCE_S, LiveEngine

from kvmanager.moves.directives import Offload, Outcome
from load_tests.harness.engine import greedy, prompt
from load_tests.harness.memory_port import MemoryPort
from load_tests.harness.patience import patience
from tests.sizes import LONG

TOKENS = 300
ANSWER = 24
PROMPTS = 30 if LONG else 4

pytestmark = pytest.mark.skipif(
    not (torch.cpu._is_avx512_supported() or torch.cpu._is_amx_tile_supported()),
    reason="vLLM keeps fp8 KV on x86 with AVX-512 or AMX only",
)


@pytest.fixture(scope="module")
def start(demo_model: Path, own_engine: Any) -> Any:
    def started() -> LiveEngine:
        arguments = {"kv_cache_dtype": "fp8"}
        engine: LiveEngine = own_engine.start(
            lambda: LiveEngine(demo_model, "bfloat16", extra_args=arguments), LiveEngine.close
        )
        return engine

    return started


@pytest.fixture(scope="module")
def first_life(start: Any) -> LiveEngine:
    engine: LiveEngine = start()
    return engine


def answer(engine: LiveEngine, tokens: list[int]) -> tuple[list[int], list[float], int]:
    """The answer's tokens, their logprobs, and how many tokens of the prompt came from the port."""
    output = engine.run(engine.answer(tokens, greedy(ANSWER, logprobs=0)))
    engine.settle()
    chosen = output.outputs[0]
    logprobs = [one[token].logprob for one, token in zip(chosen.logprobs, chosen.token_ids, strict=True)]
    return list(chosen.token_ids), logprobs, output.kv_transfer_params["crosskv"]["cpu"]


def from_device(engine: LiveEngine, tokens: list[int]) -> tuple[list[int], list[float]]:
    """What plain vLLM answers from its own cache, which has the prompt: an answer from loaded KV is that, bit by bit.

    Of the whole prompt's last tokens a processor may compute other bits than of these tokens alone.
    """
    said, logprobs, loaded = answer(engine, tokens)
    assert loaded == 0
    return said, logprobs


def test_zeroed_blocks_change_the_answer(first_life: LiveEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else equal answers would show nothing."""
    from deployments.transfer import segment_copy

    tokens = prompt(7, TOKENS)
    engine = first_life
    said, _, _ = answer(engine, tokens)
    engine.clear_device()
    scatter = segment_copy.scatter
    monkeypatch.setattr(
        segment_copy, "scatter", lambda layers, ids, layout, values: scatter(layers, ids, layout, values * 0)
    )
    wrong, _, loaded = answer(engine, tokens)
    assert loaded > 0
    assert wrong != said


def test_directives_bring_a_prompt_and_store_it_bit_by_bit(first_life: LiveEngine) -> None:
    engine, tokens = first_life, prompt(8, TOKENS)
    engine.port = MemoryPort()
    engine.clear_device()
    computed = answer(engine, tokens)[0]
    again = from_device(engine, tokens)
    assert again[0] == computed
    stored = engine.port.segments
    engine.port = MemoryPort()  # the tier was lost
    spans = sorted((span for span, _ in stored.values()), key=lambda span: span.start_block)
    assert engine.direct(Offload(tuple(spans))).result(patience(PATIENCE_S)).outcome is Outcome.DONE
    assert engine.port.segments == stored
    engine.clear_device()
    assert engine.onboard(tokens).result(patience(PATIENCE_S)).outcome is Outcome.DONE
    assert from_device(engine, tokens) == again


def test_a_fresh_engine_loads_what_was_stored_bit_by_bit_and_recomputes_what_is_damaged(
    first_life: LiveEngine, start: Any
) -> None:
    prompts = [prompt(seed, TOKENS + 40 * (seed % 4)) for seed in range(PROMPTS)]
    engine = first_life
    engine.port = MemoryPort()
    engine.clear_device()
    layer = engine.reuse.copier.layers[0]
    assert layer.dtype is torch.uint8
    cold, warm = [], []
    for tokens in prompts:
        said, _, loaded = answer(engine, tokens)
        assert loaded == 0
        cold.append(said)
        warm.append(from_device(engine, tokens))
    assert [said for said, _ in warm] == cold
    stored = dict(engine.port.segments)
    on_device = {key: sealed for key, (_, sealed) in stored.items()}

    engine = start()
    engine.port = port = MemoryPort()
    port.segments = stored
    for tokens, reused in zip(prompts, warm, strict=True):
        *again, loaded = answer(engine, tokens)
        assert loaded == (len(tokens) - 1) // BLOCK * BLOCK
        assert tuple(again) == reused
    assert {key: sealed for key, (_, sealed) in port.segments.items() if key in on_device} == on_device

    engine.clear_device()
    port.spoil = lambda sealed: sealed[:-1] + bytes([sealed[-1] ^ 1])
    again, _, loaded = answer(engine, prompts[0])
    assert (again, port.bad != []) == (cold[0], True)
