"""One engine that answers questions whole, blended, and in two ways that no server offers; chunks lie in memory.

Nothing is left between two questions: the device forgets, and the port has the documents' chunks alone.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

import torch

from configs.settings import load_settings
from deployments.protocol.engine_hints import EngineHints
from kernels.blend import choice
from load_tests.harness.engine import Engine, greedy
from load_tests.harness.memory_port import MemoryPort
from load_tests.quality.engine.judge import BLENDED, NAIVE, RANDOM, WHOLE, Answer
from load_tests.quality.engine.questions import Question

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

LIKELIEST = 20
"""Tokens of each step whose probability the engine says."""
DEVICE_BLOCKS = 160
SEGMENT_TOKENS = 128


@contextlib.contextmanager
def rows_by_chance(seed: int) -> Iterator[None]:
    """Recompute as many of the reused rows as without this, but drawn by chance."""
    chosen, draw = choice.rows_to_compute, torch.Generator().manual_seed(seed)

    def drawn(change: torch.Tensor, reused: torch.Tensor, ratio: float) -> torch.Tensor:
        return chosen(torch.rand(len(change), generator=draw).to(change.device), reused, ratio)

    with patch.object(choice, "rows_to_compute", drawn):
        yield


class Asking:
    """Use on one thread. `check_layer`, `ratio`: of a blend; naively joined KV is all of it from layer 2 on."""

    def __init__(self, model: str, dtype: str, check_layer: int, ratio: float) -> None:
        engine = {"device_blocks": DEVICE_BLOCKS, "max_num_seqs": 4, "log_stats": False}
        kv = {"segment_tokens": SEGMENT_TOKENS, "layerwise": {"enabled": "off"}}
        self._engine = Engine(load_settings({"model": model, "dtype": dtype, "engine": engine, "kv": kv}), MemoryPort())
        self._runner = asyncio.Runner()  # vLLM answers on one event loop only
        self._check_layer, self._ratio = check_layer, ratio
        self._chunks: dict[Any, Any] = {}
        self._asked = 0

    def answers(self, question: Question) -> Mapping[str, Answer]:
        """Of every arm. Raises RuntimeError where a blend was none."""
        if question.first:
            self._store(question)
        self._asked += 1
        found = {WHOLE: self._whole(question), BLENDED: self._blended(question, self._check_layer, self._ratio)}
        with rows_by_chance(self._asked):
            found[RANDOM] = self._blended(question, self._check_layer, self._ratio)
        return found | {NAIVE: self._blended(question, 1, 0.0)}

    def close(self) -> None:
        """End the engine."""
        self._engine.close()
        self._runner.close()

    def _store(self, question: Question) -> None:
        """Each document, computed alone."""
        self._engine.port.segments = {}
        for chunk in question.chunks:
            alone = self._engine.generate(
                question.ids[chunk.start : chunk.stop], greedy(1), EngineHints(short_tokens=1)
            )
            self._last(alone)  # short ones are stored, too
        self._forget()
        self._chunks = dict(self._engine.port.segments)

    def _whole(self, question: Question) -> Answer:
        params = greedy(len(question.answer), logprobs=LIKELIEST)
        return self._answer(self._engine.generate(question.ids, params))

    def _blended(self, question: Question, check_layer: int, ratio: float) -> Answer:
        counters = self._engine.reuse.paths["blend"].counters
        counters.last = None
        plan = self._engine.blend_plan(question.ids, question.chunks, ratio, check_layer)
        params = greedy(len(question.answer), logprobs=LIKELIEST)
        answer = self._answer(self._engine.blended(question.ids, params, plan))
        if counters.last is None:
            raise RuntimeError(f"nothing was blended: {dict(counters.outcomes)}")
        return answer

    def _answer(self, outputs: AsyncIterator[RequestOutput]) -> Answer:
        (one,) = self._last(outputs).outputs
        self._forget()
        self._engine.port.segments = dict(self._chunks)
        steps = [{token: float(each.logprob) for token, each in step.items()} for step in one.logprobs or ()]
        return Answer(list(one.token_ids), steps)

    def _last(self, outputs: AsyncIterator[RequestOutput]) -> RequestOutput:
        async def read() -> RequestOutput:
            return [output async for output in outputs][-1]

        return self._runner.run(read())

    def _forget(self) -> None:
        self._runner.run(self._engine.empty_device())
