"""On a model whose answers need one chunk's KV to know another: a blend answers as a prefill, a wrong one does not.

The probe model (`models/probe`) carries homes into the documents about things while it reads them, so documents whose
KV was computed alone answer next to nothing. Each test below breaks the blend as somebody might, and must see it.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
from blended_prompts import ChunkedPrompt, device_kv, last_of, store
from live_engine import BLOCK, EngineSlot, LiveEngine
from transformers import AutoTokenizer

from configs.settings import PROJECT_ROOT
from deployments.engine.load_paths.blending import job
from deployments.engine.load_paths.blending.chunk_load import ChunkLoad
from deployments.engine.load_paths.blending.job import ReusedRun
from deployments.engine.load_paths.blending.model import BlendModel
from kernels.blend.rows import rows_to_compute
from load_tests.harness.engine import greedy
from load_tests.harness.memory_port import MemoryPort
from models.training.dialogue import encode
from models.training.probe.evaluate import document_spans
from models.training.probe.prompts import heldout_dialogue
from models.training.tokenizer import ASSISTANT

PROBE = PROJECT_ROOT / "models" / "probe"
PROMPTS = 10
CHECK_LAYER = 2
RATIO = 0.15
LOUD = 30.0
"""The deviation of noise: keys of 1 are as those of tokens, and the model answers right among some of them."""


class Question:
    """A held-out two-hop question, behind documents that are chunks."""

    def __init__(self, seed: int, tokenizer: Any) -> None:
        dialogue = heldout_dialogue(700 + seed, 512, turns=1)
        ids, _ = encode(dialogue, tokenizer, frozenset())
        spans = document_spans(ids, tokenizer)
        asked = ids.index(tokenizer.get_vocab()[ASSISTANT], spans[-1][1]) + 1
        self.prompt = ChunkedPrompt(ids[:asked], [range(*span) for span in spans])
        self.answer = tokenizer.encode(dialogue.turns[0].answer, add_special_tokens=False)


@pytest.fixture(scope="module")
def probe(own_engine: Any) -> Iterator[LiveEngine]:
    live = EngineSlot(PROBE, own_engine).get()
    yield live
    live.settle()
    assert live.blocks_in_use() == 0


@pytest.fixture(scope="module")
def questions(probe: LiveEngine) -> list[Question]:
    """Their chunks are in the port."""
    tokenizer = AutoTokenizer.from_pretrained(PROBE)
    probe.port = MemoryPort()
    found = [Question(seed, tokenizer) for seed in range(PROMPTS)]
    for question in found:
        store(probe, question.prompt)
    return found


@dataclass(frozen=True)
class Seen:
    """What one blend answered, how likely each token was at each step, and the KV that it left."""

    tokens: list[int]
    logprobs: list[dict[int, float]]
    kv: torch.Tensor


def blend(engine: LiveEngine, question: Question, ratio: float, check_layer: int) -> Seen:
    """What a blend does not write is noise, not what was there before, and too loud to be overheard."""
    engine.clear_device()
    for layer in engine.reuse.copier.layers:
        engine.on_engine_thread(partial(layer.normal_, 0.0, LOUD))
    stored, one = dict(engine.port.segments), question.prompt
    plan = engine.blend_plan(one.tokens, one.chunks, ratio, check_layer)
    outputs = engine.blended(one.tokens, greedy(len(question.answer), logprobs=20), plan)
    output = engine.run(last_of(outputs))
    engine.settle()
    engine.port.segments = stored
    steps = [{token: float(each.logprob) for token, each in step.items()} for step in output.outputs[0].logprobs or ()]
    end = (one.chunks[-1].start + len(one.chunks[-1]) // BLOCK * BLOCK) // BLOCK
    return Seen(list(output.outputs[0].token_ids), steps, device_kv(engine, one.tokens, end, ratio))


def divergence(found: Seen, wanted: Seen) -> float:
    """The largest KL of a step, in nats, as long as both have answered the same."""
    worst = 0.0
    for token, other, p, q in zip(wanted.tokens, found.tokens, wanted.logprobs, found.logprobs, strict=True):
        worst = max(worst, sum(math.exp(x) * (x - q.get(each, -20.0)) for each, x in p.items()))
        if token != other:
            break
    return worst


def deviation(found: Seen, wanted: Seen) -> float:
    """How far the KV behind the check layer is from a prefill's, by its size."""
    behind = slice(CHECK_LAYER + 1, None)
    return float((found.kv[behind] - wanted.kv[behind]).norm() / wanted.kv[behind].norm())


@dataclass(frozen=True)
class Judged:
    """Of all questions: the right answers, and the means of both distances from a prefill."""

    right: int
    divergence: float
    deviation: float


@pytest.fixture(scope="module")
def prefilled(probe: LiveEngine, questions: list[Question]) -> list[Seen]:
    """With every row computed anew, which `test_blend_equality.py` holds to be vLLM's prefill."""
    return [blend(probe, question, 1.0, 1) for question in questions]


def judge(
    engine: LiveEngine, questions: list[Question], wanted: list[Seen], ratio: float = RATIO, check: int = CHECK_LAYER
) -> Judged:
    found = [blend(engine, question, ratio, check) for question in questions]
    pairs = list(zip(found, wanted, strict=True))
    return Judged(
        sum(seen.tokens == question.answer for seen, question in zip(found, questions, strict=True)),
        sum(divergence(*pair) for pair in pairs) / len(pairs),
        sum(deviation(*pair) for pair in pairs) / len(pairs),
    )


@pytest.fixture(scope="module")
def well(probe: LiveEngine, questions: list[Question], prefilled: list[Seen]) -> Judged:
    """A blend that nobody has broken."""
    return judge(probe, questions, prefilled)


def test_a_blend_answers_as_a_prefill(questions: list[Question], prefilled: list[Seen], well: Judged) -> None:
    answered = sum(seen.tokens == question.answer for seen, question in zip(prefilled, questions, strict=True))
    assert answered >= PROMPTS - 1
    assert well.right >= answered
    assert well.divergence <= 0.002


def test_kv_that_is_only_joined_answers_much_worse(
    probe: LiveEngine, questions: list[Question], prefilled: list[Seen], well: Judged
) -> None:
    joined = judge(probe, questions, prefilled, ratio=0.0, check=1)
    assert joined.right <= well.right - 3
    assert joined.divergence >= 100 * well.divergence


def moved_by_one_more(patch: pytest.MonkeyPatch) -> None:
    shifted = BlendModel.shifted
    patch.setattr(BlendModel, "shifted", lambda self, layer, keys, by: shifted(self, layer, keys, by + 1))


def not_moved(patch: pytest.MonkeyPatch) -> None:
    shifted = BlendModel.shifted
    patch.setattr(BlendModel, "shifted", lambda self, layer, keys, by: shifted(self, layer, keys, 0))


def share_of_all_rows(patch: pytest.MonkeyPatch) -> None:
    def chosen(change: torch.Tensor, reused: torch.Tensor, ratio: float) -> torch.Tensor:
        return change.topk(round(ratio * len(change))).indices.sort().values

    patch.setattr(job, "rows_to_compute", chosen)


def rows_without_kv_are_dropped(patch: pytest.MonkeyPatch) -> None:
    def dropped(change: torch.Tensor, reused: torch.Tensor, ratio: float) -> torch.Tensor:
        rows = rows_to_compute(change, reused, ratio)
        return rows[reused[rows] | (torch.arange(len(rows)) % 2 == 0)]

    patch.setattr(job, "rows_to_compute", dropped)


def chunks_are_swapped(patch: pytest.MonkeyPatch) -> None:
    runs = ChunkLoad.runs

    def swapped(self: ChunkLoad) -> list[ReusedRun]:
        found = runs(self)
        kv = [run.kv for run in reversed(found)]
        sizes = [min(run.kv.shape[2], other.shape[2]) for run, other in zip(found, kv, strict=True)]
        return [
            run._replace(kv=other[:, :, :size].contiguous()) for run, other, size in zip(found, kv, sizes, strict=True)
        ]

    patch.setattr(ChunkLoad, "runs", swapped)


def any_rows_are_chosen(patch: pytest.MonkeyPatch) -> None:
    draw = torch.Generator().manual_seed(1)

    def drawn(change: torch.Tensor, reused: torch.Tensor, ratio: float) -> torch.Tensor:
        return rows_to_compute(torch.rand(len(change), generator=draw), reused, ratio)

    patch.setattr(job, "rows_to_compute", drawn)


@pytest.mark.parametrize(
    "broken", [chunks_are_swapped, any_rows_are_chosen, share_of_all_rows, rows_without_kv_are_dropped]
)
def test_of_the_wrong_rows_or_chunks_the_answers_are_much_worse(
    probe: LiveEngine,
    questions: list[Question],
    prefilled: list[Seen],
    well: Judged,
    monkeypatch: pytest.MonkeyPatch,
    broken: Any,
) -> None:
    broken(monkeypatch)
    found = judge(probe, questions, prefilled)
    assert found.right < well.right
    assert found.divergence >= 100 * well.divergence


@pytest.mark.parametrize("broken", [moved_by_one_more, not_moved])
def test_keys_at_wrong_places_are_seen_in_the_kv(
    probe: LiveEngine,
    questions: list[Question],
    prefilled: list[Seen],
    well: Judged,
    monkeypatch: pytest.MonkeyPatch,
    broken: Any,
) -> None:
    """Not in the answers: behind the check layer this model looks for keys by what they say, hardly by their place."""
    broken(monkeypatch)
    found = judge(probe, questions, prefilled)
    assert found.deviation >= 1.15 * well.deviation
