"""Prompts of chunks for a live engine, and the KV that it has of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from live_engine import BLOCK, LiveEngine, usage
from vllm.outputs import RequestOutput

from configs.blending import DEFAULT_RECOMPUTE_RATIO
from deployments.engine.load_paths.blending.job import BlendParts
from deployments.protocol.engine_hints import EngineHints
from kernels.paged.gather_scatter import gather
from kvmanager.moves.plan import Plan
from kvmanager.segments.keys import BLENDED, Fidelity, block_hashes
from load_tests.harness.engine import greedy, prompt


@dataclass(frozen=True)
class ChunkedPrompt:
    """Token ids, and where the chunks lie in them."""

    tokens: list[int]
    chunks: list[range]


def chunked(seed: int, head: int, sizes: Sequence[int], question: int) -> ChunkedPrompt:
    """`head` tokens, chunks of these sizes, `question` tokens; equal seeds give equal chunks, in any order."""
    tokens = prompt(10_000 + 100 * seed, head)
    chunks = []
    for number, size in enumerate(sizes):
        chunks.append(range(len(tokens), len(tokens) + size))
        tokens += prompt(10_001 + 100 * seed + number, size)
    return ChunkedPrompt(tokens + prompt(10_099 + 100 * seed, question), chunks)


def store(engine: LiveEngine, one: ChunkedPrompt, only: Sequence[int] | None = None) -> None:
    """Have the port hold the chunks, or some of them, each computed alone; nothing is left on the device."""
    for number, chunk in enumerate(one.chunks):
        if only is None or number in only:
            tokens = one.tokens[chunk.start : chunk.stop]
            engine.run(
                last_of(engine.generate(tokens, greedy(1), EngineHints(short_tokens=1)))
            )  # short ones are stored, too
    engine.settle()
    engine.clear_device()


async def last_of(outputs: Any) -> RequestOutput:
    return [output async for output in outputs][-1]


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    usage: dict[str, int]
    blended: int
    cached: int


def answer_of(output: RequestOutput) -> Answer:
    counts = (output.kv_transfer_params or {})["crosskv"]
    return Answer(list(output.outputs[0].token_ids), usage(output), counts.get("blended", 0), output.num_cached_tokens)


def ask(
    engine: LiveEngine,
    one: ChunkedPrompt,
    ratio: float = DEFAULT_RECOMPUTE_RATIO,
    check_layer: int = 2,
    *,
    plan: Plan | None = None,
    fidelity: Fidelity = BLENDED,
    max_tokens: int = 8,
    **options: Any,
) -> Answer:
    """The blended answer, when all is at rest."""
    plan = plan or engine.blend_plan(one.tokens, one.chunks, ratio, check_layer)
    params = greedy(max_tokens, **options)
    output = engine.run(last_of(engine.blended(one.tokens, params, plan, fidelity, ratio)))
    engine.settle()
    return answer_of(output)


def parts(engine: LiveEngine) -> BlendParts:
    """Of the last blend."""
    found = engine.reuse.paths["blend"].counters.last
    assert found is not None
    return found


def device_kv(engine: LiveEngine, tokens: Sequence[int], blocks: int, ratio: float | None = None) -> torch.Tensor:
    """``(layers, 2, tokens, heads, dim)`` of a prompt's first blocks, as the device's prefix cache has them.

    ``ratio``: it was blended so; None: it is exact.
    """
    salt = engine.salt if ratio is None else engine.blended_salt(ratio)
    hashes = block_hashes(tokens, BLOCK, salt)[:blocks]
    pool, copier = engine.scheduler.kv_cache_manager.block_pool, engine.reuse.copier

    def read() -> torch.Tensor:
        ids = [pool.get_cached_block(each, [0])[0].block_id for each in hashes]
        kv = torch.empty(copier.layout.segment_shape(len(copier.layers), len(ids)), dtype=copier.layout.dtype)
        gather(copier.layers, ids, copier.layout, kv)
        return kv

    return engine.on_engine_thread(read)
