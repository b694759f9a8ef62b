"""Blended prompts for an engine in this process, over a port in memory: what ingress and manager make of them.

A chunk is stored by asking for it alone: `engine.stream(tokens[chunk.start:chunk.stop], greedy(1))`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import TYPE_CHECKING, Any

from configs.blend_section import DEFAULT_CHECK_LAYER, DEFAULT_RECOMPUTE_RATIO
from deployments.protocol.kv_port import FIDELITY, PLAN, PlanDict, PlannedBlend, PlannedChunk
from kvmanager.segments.keys import BLENDED, BlockHash, block_hashes, cache_salt
from load_tests.harness.engine import SECRET, Engine

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.outputs import RequestOutput


def blended_salt(engine: Engine) -> str:
    """What blended prompts are named with, where there are no tenants."""
    return cache_salt(SECRET, engine.fingerprint, "", BLENDED)


def blended_hashes(engine: Engine, tokens: Sequence[int]) -> list[BlockHash]:
    """A blended prompt's own names."""
    return block_hashes(tokens, engine.block_tokens, blended_salt(engine))


def blend_plan(
    engine: Engine,
    tokens: Sequence[int],
    chunks: Sequence[range],
    ratio: float = DEFAULT_RECOMPUTE_RATIO,
    check_layer: int = DEFAULT_CHECK_LAYER,
    seconds: float = 0.0,
) -> PlanDict:
    """What the port has of a prompt's own beginning and of its chunks, which are positions of `tokens`."""
    plan: PlanDict = engine.port.plan(blended_hashes(engine, tokens))
    stored = []
    for chunk in chunks:
        found = engine.port.plan(engine.hashes(tokens[chunk.start : chunk.stop]), used=False)["segments"]
        if found:
            stored.append(PlannedChunk(chunk.start, found))
    if stored:
        plan["blend"] = PlannedBlend(chunks=stored, ratio=ratio, check_layer=check_layer, seconds=seconds)
    return plan


def blended(
    engine: Engine, tokens: Sequence[int], params: SamplingParams, plan: PlanDict, **transfer: Any
) -> AsyncIterator[RequestOutput]:
    """vLLM's outputs for a blended prompt with this plan."""
    return engine.generate(tokens, params, {PLAN: plan, FIDELITY: BLENDED, **transfer}, blended_salt(engine))
