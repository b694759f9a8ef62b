"""Blended KV is a prefill's where all is recomputed, and naive reuse where nothing is; between them it repairs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from configs.settings import PROJECT_ROOT
from kernels.rope.shift import shift_keys
from load_tests.blending.forward import Prefill, StoredChunk, blend, moves_truly, prefill, stored_chunks, why_not
from load_tests.codec.model import continued, divergence, load_model
from models.training.dialogue import encode
from models.training.probe.evaluate import alone_mask, document_spans
from models.training.probe.prompts import heldout_dialogue

PROBE = PROJECT_ROOT / "models" / "probe"


@pytest.fixture(scope="module")
def probe() -> Any:
    return load_model(PROBE)


@pytest.fixture(scope="module")
def case(probe: Any) -> tuple[list[int], list[tuple[int, int]], Prefill]:
    """A held-out conversation of four documents with its answers, where they stand, and its prefill."""
    tokenizer: Any = AutoTokenizer.from_pretrained(PROBE)
    ids, _ = encode(heldout_dialogue(5, 512), tokenizer, frozenset())
    return ids, document_spans(ids, tokenizer), prefill(probe, ids)


Case = tuple[list[int], list[tuple[int, int]], Prefill]


@pytest.mark.parametrize("check_layer", [1, 2, 5])
def test_where_all_is_recomputed_the_kv_is_a_prefills(probe: Any, case: Case, check_layer: int) -> None:
    ids, spans, full = case
    chunks = stored_chunks(probe, ids, spans)
    kv = blend(probe, full, chunks, check_layer, 1.0)
    assert kv.shape[2] == chunks[-1].stop
    assert float((kv - full.kv[:, :, : kv.shape[2]]).abs().max()) <= 1e-5


def test_naive_reuse_is_documents_that_saw_nothing_before_them(probe: Any, case: Case) -> None:
    ids, spans, full = case
    chunks = stored_chunks(probe, ids, spans, block_tokens=1)
    kv = blend(probe, full, chunks, 0, 0.0)
    joined = continued(probe, kv, ids[kv.shape[2] :])
    with torch.inference_mode():
        masked = probe(torch.tensor([ids]), attention_mask=alone_mask(len(ids), spans, torch.float32)).logits[0]
    # What is stored is rounded to bfloat16.
    assert float(divergence(masked[kv.shape[2] :], joined).max()) < 0.01
    assert float(divergence(full.logits[kv.shape[2] :], joined).max()) > 1


def test_a_blend_repairs_what_naive_reuse_loses_and_as_many_random_rows_do_not(probe: Any, case: Case) -> None:
    ids, spans, full = case
    chunks = stored_chunks(probe, ids, spans)

    def loss(check_layer: int, ratio: float, choice: Any = "deviation") -> float:
        kv = blend(probe, full, chunks, check_layer, ratio, choice)
        return float(divergence(full.logits[kv.shape[2] :], continued(probe, kv, ids[kv.shape[2] :])).mean())

    naive, blended = loss(0, 0.0), loss(2, 0.15)
    assert blended < 0.1 * naive
    assert loss(2, 0.15, "random") > 5 * blended


def test_keys_that_are_moved_wrongly_are_seen(probe: Any, case: Case) -> None:
    ids, spans, full = case
    for chunk in stored_chunks(probe, ids, spans):
        assert moves_truly(probe, full, chunk)
        kv = chunk.kv.clone()
        shift_keys(kv[0, 0], 1, probe.model.rotary_emb.inv_freq.float(), "neox")
        assert not moves_truly(probe, full, StoredChunk(chunk.start, kv))


def test_only_whole_blocks_are_stored(probe: Any, case: Case) -> None:
    ids, _, _ = case
    assert [chunk.stop for chunk in stored_chunks(probe, ids, [(0, 70), (80, 111)])] == [64]


def test_models_whose_keys_cannot_be_moved_are_refused_in_words(probe: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert why_not(probe) is None
    monkeypatch.setattr(probe.model.rotary_emb, "rope_type", "dynamic")
    assert "'dynamic'" in str(why_not(probe))
    monkeypatch.setattr(probe.config, "layer_types", ["full_attention", "sliding_attention"], raising=False)
    assert "sliding window" in str(why_not(probe))
