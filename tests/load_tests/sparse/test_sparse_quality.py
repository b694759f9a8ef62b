"""The masked reference against attention over kept tokens alone; the greedy search."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from configs.model_folder import PROJECT_ROOT
from deployments.segment_store.sparse.budget_files import KEPT_PROFILE_FILE, find_budgets
from kernels.codecs import CodecProfile, make_codec
from kernels.codecs.step_plan import normal_histogram
from kernels.sparse.section import SparseForm
from kvmanager.extensions.sparse.budgets import EIGHTHS, Budgets
from load_tests.codec.model import continued, load_model, prefix_kv
from load_tests.codec.profile_measure import Distributions, level_factors
from load_tests.codec.questions import DEMO, conversations
from load_tests.sparse import profile
from load_tests.sparse.calibrate import calibrate
from load_tests.sparse.choices import sparse_kv
from load_tests.sparse.judge import Cost, Held, cost_of, hold
from load_tests.sparse.masked_model import MaskedModel

LAYERS = 6
WHOLE = Budgets.of_eighths([EIGHTHS] * LAYERS)


@pytest.fixture(scope="module")
def masked() -> MaskedModel:
    return MaskedModel(load_model(DEMO))


@pytest.fixture(scope="module")
def held(masked: MaskedModel) -> list[Held]:
    return hold(masked, conversations(22, 42))


def program() -> typer.Typer:
    app = typer.Typer()
    app.command()(profile.main)
    return app


def cost(kl: float = 0.0, lost: int = 0, **changed: Any) -> Cost:
    fields: dict[str, Any] = {
        "kl": kl, "worst_kl": kl, "questions": 198, "lost": lost, "gained": 0, "changed": lost, "kept": 0.5,
        "raw_bytes": 10, "coded_bytes": 5, "by_kind": {},
    }  # fmt: skip
    return Cost(**(fields | changed))


def test_with_all_keys_the_masked_model_is_the_plain_one(masked: MaskedModel) -> None:
    conversation = next(iter(conversations(11, 1)))
    plain = load_model(DEMO)
    kv, _ = masked.prefix(conversation.prefix)
    torch.testing.assert_close(kv, prefix_kv(plain, conversation.prefix), rtol=0, atol=0)
    expected = continued(plain, kv, conversation.rest)
    for kept in (None, torch.ones(LAYERS, 2, kv.shape[2], dtype=torch.bool)):
        torch.testing.assert_close(masked.continued(kv, conversation.rest, kept), expected, rtol=1e-5, atol=1e-5)


def test_masking_keys_is_attending_to_the_kept_ones_alone(masked: MaskedModel, held: list[Held]) -> None:
    """What a layer's attention gives is softmax over the keys of its KV head's index, and of what came after."""
    one = held[0]
    sparse = sparse_kv(one.kv, one.mass, Budgets.of_eighths([1, 8, 4, 2, 6, 1]))
    seen: list[tuple[int, Any, Any, Any, Any, float]] = []
    plain_attend = masked._attend

    def noted(module: Any, query: Any, key: Any, value: Any, mask: Any, scaling: float, **named: Any) -> Any:
        found = plain_attend(module, query, key, value, mask, scaling, **named)
        seen.append((module.layer_idx, query[0], key[0], value[0], found[0][0], scaling))
        return found

    masked._attend = noted  # type: ignore[method-assign]
    try:
        masked.continued(one.kv, one.rest, sparse.kept)
    finally:
        del masked._attend  # type: ignore[method-assign]
    assert [layer for layer, *_ in seen] == list(range(LAYERS))
    prefix, row = one.kv.shape[2], len(one.rest) // 2
    for layer, query, key, value, out, scaling in seen:
        for head in range(len(query)):
            of = head * len(key) // len(query)
            index = torch.cat([sparse.kept[layer, of].nonzero()[:, 0], torch.arange(prefix, prefix + row + 1)])
            weights = (key[of, index] @ query[head, row] * scaling).softmax(0)
            torch.testing.assert_close(out[row, head], weights @ value[of, index], rtol=1e-4, atol=1e-5)


def test_every_layer_and_head_keeps_its_budget_of_every_segment(held: list[Held]) -> None:
    budgets = Budgets.of_eighths([1, 2, 3, 4, 5, 8])
    one = max(held, key=lambda each: each.kv.shape[2])
    kept = sparse_kv(one.kv, one.mass, budgets).kept
    for start in range(0, one.kv.shape[2], 256):
        part = kept[:, :, start : start + 256]
        blocks = part.shape[2] // 32
        for layer in range(LAYERS):
            assert part[layer].sum(-1).tolist() == [32 * budgets.kept_blocks(layer, blocks)] * 2
        assert part[..., -8:].all(), "the recent ones"


def test_whole_kv_costs_nothing_and_a_sixth_of_the_important_layers_does(masked: MaskedModel, held: list[Held]) -> None:
    whole = cost_of(masked, held, WHOLE, SparseForm())
    assert (whole.lost, whole.gained, whole.changed, whole.kept) == (0, 0, 0, 1.0)
    assert whole.kl < 1e-9
    assert whole.raw_bytes < whole.coded_bytes < 1.01 * whole.raw_bytes
    assert cost_of(masked, held, Budgets.of_eighths([8, 2, 2, 8, 8, 8])).kl > 0.1


def test_what_goes_through_its_bytes_answers_as_what_is_masked(masked: MaskedModel, held: list[Held]) -> None:
    budgets = Budgets.of_eighths([2, 8, 8, 4, 1, 1])
    direct, packed = cost_of(masked, held, budgets), cost_of(masked, held, budgets, SparseForm())
    assert packed.kl == pytest.approx(direct.kl, abs=1e-9)
    assert packed.as_row()["times_smaller_than_bf16"] == pytest.approx(1 / packed.kept, rel=0.02)
    profile_ = CodecProfile.from_bytes((DEMO / KEPT_PROFILE_FILE).read_bytes())
    coded = cost_of(masked, held, budgets, SparseForm(make_codec("cachegen", 2, profile_)))
    assert coded.coded_bytes < 0.25 * packed.coded_bytes


def test_the_shipped_budgets_keep_less_than_half_and_lose_nothing_measurable(masked: MaskedModel) -> None:
    found = cost_of(masked, hold(masked, conversations(66, 7_300_000)), find_budgets(str(DEMO), "layers", LAYERS))
    assert found.kept <= 0.5
    assert found.lost <= 1
    assert found.kl <= 0.002


def test_the_search_lowers_the_harmless_layers_first_and_keeps_the_others() -> None:
    asked: list[tuple[int, ...]] = []

    def measure(budgets: Budgets) -> Cost:
        eighths = tuple(int(8 * share) for share in budgets.shares)
        asked.append(eighths)
        return cost(kl=sum((8 - number) * price for number, price in zip(eighths, (1e-4, 2e-4, 0), strict=True)))

    ticks: list[None] = []
    found = calibrate(3, measure, 0.00075, lambda: ticks.append(None))
    assert [int(8 * share) for share in found.budgets.shares] == [1, 8, 1]
    assert asked[:3] == [(2, 8, 8), (8, 2, 8), (8, 8, 2)]
    assert [one.kl for one in found.alone] == pytest.approx([0.0006, 0.0012, 0])
    assert found.cost.kl == pytest.approx(0.0007)
    assert len(ticks) == 6


def test_answers_count_beside_the_divergence() -> None:
    def measure(budgets: Budgets) -> Cost:
        return cost(lost=2 if budgets.shares[0] < 1 else 0)

    assert calibrate(2, measure).budgets.shares == (1, Budgets.of_eighths([1]).shares[0])


def test_bits_go_to_what_is_stored() -> None:
    """Two layers, equally sensitive: where the first keeps little, the second gets coarser steps than before."""
    counts = [[normal_histogram()] * 2 for _ in range(2)]
    found = Distributions(torch.zeros(()), torch.zeros(()), counts, counts, counts)
    sensitivity = np.ones((2, 2))
    sensitivity[1] *= 10
    plain = level_factors(found, sensitivity, 2.5)
    kept = level_factors(found, sensitivity, 2.5, [0.125, 1.0])
    assert (kept[1] >= plain[1]).all()
    assert kept[1].sum() > plain[1].sum()
    assert (level_factors(found, sensitivity, 2.5, [1, 1]) == plain).all()


def test_budgets_are_measured_and_written_beside_the_weights(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(DEMO, tmp_path / "demo", ignore=shutil.ignore_patterns("crosskv_*")))
    text = tmp_path / "text.txt"
    text.write_text((PROJECT_ROOT / "README.md").read_text() * 40)
    done = CliRunner().invoke(program(), ["--model", str(folder), "--text", str(text), "--quick", "--most-kl", "0.5"])
    assert done.exit_code == 0, done.output
    assert any(share < 1 for share in find_budgets(str(folder), "layers", LAYERS).shares)
    assert CodecProfile.from_bytes((folder / KEPT_PROFILE_FILE).read_bytes()).shape == (LAYERS, 2, 64)


def test_a_model_that_is_no_folder_of_weights_is_refused_in_a_sentence() -> None:
    assert CliRunner().invoke(program(), ["--model", "qwen3-8b"]).exit_code == 2
