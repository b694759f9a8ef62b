"""On a model whose answers need one chunk's KV to know another: a blend answers as a prefill, a wrong one does not.

The probe model (`models/probe`) carries homes into the documents about things while it reads them, so documents whose
KV was computed alone answer next to nothing. Each test below breaks the blend as somebody might, and must see it.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch
from blended_prompts import ChunkedPrompt, ask, store
from live_engine import EngineSlot, LiveEngine
from models.training.dialogue import encode
from models.training.probe.evaluate import document_spans
from models.training.probe.prompts import heldout_dialogue
from models.training.tokenizer import ASSISTANT
from transformers import AutoTokenizer

from configs.settings import PROJECT_ROOT
from deployments.engine.blending.chunk_load import ChunkLoad
from deployments.engine.blending.job import ReusedRun
from deployments.engine.blending.model import BlendModel
from kernels.blend import choice
from load_tests.harness.memory_port import MemoryPort

PROBE = PROJECT_ROOT / "models" / "probe"
PROMPTS = 10
CHECK_LAYER = 2
RATIO = 0.15


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
def probe(one_engine: Any) -> Iterator[LiveEngine]:
    live = EngineSlot(PROBE, one_engine).get("float32")
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


def right(engine: LiveEngine, questions: list[Question], ratio: float = RATIO, check_layer: int = CHECK_LAYER) -> int:
    """Right answers of blends. What a blend does not write is noise, not what was there before."""
    count, stored = 0, dict(engine.port.segments)
    for question in questions:
        engine.clear_device()
        for layer in engine.reuse.copier.layers:
            engine.on_engine_thread(layer.normal_)
        found = ask(engine, question.prompt, ratio, check_layer, max_tokens=len(question.answer))
        count += found.tokens == question.answer
        engine.port.segments = dict(stored)
    return count


def test_a_blend_answers_as_a_prefill_and_kv_that_is_only_joined_does_not(
    probe: LiveEngine, questions: list[Question]
) -> None:
    assert right(probe, questions, ratio=1.0) >= PROMPTS - 1
    assert right(probe, questions) >= PROMPTS - 1
    assert right(probe, questions, ratio=0.0, check_layer=1) <= PROMPTS // 4


def moved_by_one_more(patch: pytest.MonkeyPatch) -> None:
    shifted = BlendModel.shifted
    patch.setattr(BlendModel, "shifted", lambda self, layer, keys, by: shifted(self, layer, keys, by + 1))


def share_of_all_rows(patch: pytest.MonkeyPatch) -> None:
    def chosen(change: torch.Tensor, reused: torch.Tensor, ratio: float) -> torch.Tensor:
        return change.topk(round(ratio * len(change))).indices.sort().values

    patch.setattr(choice, "rows_to_compute", chosen)


def rows_without_kv_are_dropped(patch: pytest.MonkeyPatch) -> None:
    chosen = choice.rows_to_compute

    def dropped(change: torch.Tensor, reused: torch.Tensor, ratio: float) -> torch.Tensor:
        rows = chosen(change, reused, ratio)
        return rows[reused[rows] | (torch.arange(len(rows)) % 2 == 0)]

    patch.setattr(choice, "rows_to_compute", dropped)


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
    chosen, draw = choice.rows_to_compute, torch.Generator().manual_seed(1)

    def drawn(change: torch.Tensor, reused: torch.Tensor, ratio: float) -> torch.Tensor:
        return chosen(torch.rand(len(change), generator=draw), reused, ratio)

    patch.setattr(choice, "rows_to_compute", drawn)


@pytest.mark.parametrize(
    ("broken", "most"),
    [
        (moved_by_one_more, PROMPTS // 2),
        (share_of_all_rows, PROMPTS // 2),
        (rows_without_kv_are_dropped, PROMPTS // 2),
        (chunks_are_swapped, PROMPTS // 2),
        (any_rows_are_chosen, PROMPTS - 3),
    ],
)
def test_a_blend_that_is_broken_answers_much_worse(
    probe: LiveEngine, questions: list[Question], monkeypatch: pytest.MonkeyPatch, broken: Any, most: int
) -> None:
    broken(monkeypatch)
    assert right(probe, questions) <= most
