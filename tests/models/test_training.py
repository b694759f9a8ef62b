"""A run is resumable, its attention computes what the stock one does, and its batches waste little."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
import torch

from models.training import attention, curriculum
from models.training.architecture import LAYERS, build_model
from models.training.tokenizer import build_tokenizer
from models.training.train import PEAK_RATE, Trainer, learning_rate, micro_batches


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def test_a_restarted_run_goes_on_exactly_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = curriculum.Stage(10_000, (32,), 0.5, 0.1, 200)
    monkeypatch.setattr(curriculum, "STAGES", (small,))
    first = Trainer(tmp_path / "work", tmp_path / "demo", seed=5)
    first.step()
    first.save()
    uninterrupted = [first.step() for _ in range(2)]
    second = Trainer(tmp_path / "work", tmp_path / "demo", seed=5)
    assert second.state.step == 1
    assert [second.step() for _ in range(2)] == uninterrupted
    assert Trainer(tmp_path / "work", tmp_path / "demo", seed=5, fresh=True).state.step == 0


def test_blocked_attention_equals_the_stock_one_across_block_borders() -> None:
    attention.register()
    tokenizer = build_tokenizer()
    model = build_model(
        tokenizer.get_vocab(), tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id, seed=0
    )
    ids = torch.randint(7, len(tokenizer), (2, attention.BLOCK + 37), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        stock = model(ids).logits
        model.set_attn_implementation(attention.NAME)
        assert torch.allclose(model(ids).logits, stock, atol=1e-3)


def test_the_first_layer_starts_by_looking_back_one_to_four_tokens() -> None:
    tokenizer = build_tokenizer()
    model = build_model(
        tokenizer.get_vocab(), tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id, seed=0
    )
    model.set_attn_implementation("eager")
    ids = torch.randint(7, len(tokenizer), (1, 300), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        attentions = model(ids, output_attentions=True).attentions
    assert len(attentions) == LAYERS
    for head in range(4):
        assert attentions[0][0, head, 200, 200 - head - 1] > 0.9


def test_micro_batches_hold_every_sample_with_little_padding() -> None:
    tokenizer = build_tokenizer()
    keys = curriculum.key_ids(tokenizer)
    samples = curriculum.batch(0, Random(0).randint(0, 99), 3_000_000, tokenizer, keys)
    batches = micro_batches(samples, tokenizer.pad_token_id)
    assert sum(len(ids) for ids, _ in batches) == len(samples)
    real = sum(len(ids) for ids, _ in samples)
    assert sum(ids.numel() for ids, _ in batches) <= 1.5 * real


def test_the_learning_rate_warms_up_and_decays() -> None:
    total = curriculum.total_tokens()
    rates = [learning_rate(tokens, total) for tokens in range(0, total, total // 50)]
    assert rates[0] < PEAK_RATE == max(rates)
    assert rates[-1] < PEAK_RATE / 4
