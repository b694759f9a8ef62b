"""The table of quality: what is asked is what the answers say, exact KV loses nothing, and noise loses nearly all."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from transformers import AutoTokenizer
from typer.testing import CliRunner

from kernels.codecs import CodecProfile
from load_tests.blending.forward import Prefill
from load_tests.codec.model import kv_shape, load_model
from load_tests.quality import __main__ as quality
from load_tests.quality.cases import DEMO, KINDS, PROBE, Case, demo_cases, probe_cases
from load_tests.quality.first_tokens import FirstTokens
from load_tests.quality.measure import PREFILL, Cell, Row, measure
from load_tests.quality.methods import FourBits, methods
from load_tests.quality.sparse import MaskedKV, sparse_methods


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(DEMO)


@pytest.fixture(scope="module")
def probe_rows(tokenizer: Any) -> dict[str, Row]:
    model = load_model(PROBE)
    profile = CodecProfile.generic(kv_shape(model))
    rows = [*methods(profile, 2, 0.15), Noise()]
    return {row.name: row for row in measure(model, list(probe_cases(tokenizer, 4, 5)), rows, lambda: None)}


class Noise:
    """A method that keeps nothing of the KV."""

    name, bytes_ratio, computed = "noise", 1000.0, 0.0

    def kv(self, model: Any, case: Case, full: Prefill) -> torch.Tensor | None:
        """See `Method`."""
        return torch.randn(*full.kv.shape[:2], case.prefix, *full.kv.shape[3:])


def test_four_bits_move_a_value_by_half_a_step_at_most() -> None:
    prompt = Case(ids=list(range(70)), prefix=67, chunks=[], stretches=[])
    values = torch.randn(2, 2, 70, 3, 64).bfloat16()
    method = FourBits()
    found = method.kv(None, prompt, Prefill(hidden=[], kv=values, logits=torch.empty(0)))
    assert found is not None
    whole = values[:, :, :64].float()
    step = (whole.amax(-1) - whole.amin(-1)).unsqueeze(-1) / 15
    moved = (found.float() - whole).abs()
    assert (moved <= 0.51 * step + 0.02).all()
    assert max(vector.unique().numel() for vector in found.flatten(0, 3)) <= 16
    assert method.bytes_ratio == pytest.approx(3.56, abs=0.01)


def test_stretches_are_the_answers(tokenizer: Any) -> None:
    kinds = set()
    for case in demo_cases(tokenizer, 3, 1):
        assert max(stop for _, stop in case.chunks) <= case.prefix < case.stretches[0].first
        for stretch in case.stretches:
            kinds.add(stretch.kind)
            text = tokenizer.decode(case.ids[stretch.first : stretch.stop])
            before = tokenizer.decode(case.ids[: stretch.first])
            if stretch.by_token:
                assert before.rpartition("<|assistant|>")[2] + text in before
            else:
                assert before.endswith("<|assistant|>")
                assert text.endswith(".<|end|>")
    assert kinds == {"one hop", "two hops", "distractors", "copied"}


def test_documents_are_chunks_that_begin_with_their_mark(tokenizer: Any) -> None:
    for make in (demo_cases, probe_cases):
        for case in make(tokenizer, 2, 3):
            assert len(case.chunks) >= 4
            assert all(case.ids[start] == tokenizer.get_vocab()["<|doc|>"] for start, _ in case.chunks)
            assert [stop for _, stop in case.chunks[:-1]] == [start for start, _ in case.chunks[1:]]


def test_exact_kv_loses_nothing_noise_all_and_naive_reuse_what_blending_keeps(probe_rows: dict[str, Row]) -> None:
    whole = probe_rows[PREFILL].cells["joined hops"]
    assert whole.asked >= 12
    assert whole.share >= 0.9
    exact, naive = probe_rows["exact, lossless"], probe_rows["naive reuse of documents"]
    blended = probe_rows["blended, check layer 2, ratio 0.15"]
    assert exact.cells["joined hops"].right == blended.cells["joined hops"].right == whole.right
    assert exact.kl < 1e-4
    assert blended.kl < 2e-3 < naive.kl
    assert naive.cells["joined hops"].share <= whole.share - 0.3
    assert probe_rows["noise"].cells["joined hops"].share <= 0.3


def test_sparse_rows_keep_what_matters_or_lose_it(tokenizer: Any) -> None:
    """The calibrated level beside the coarsest uniform one, on the demo model; on top of it a codec."""
    rows = measure(
        load_model(DEMO), list(demo_cases(tokenizer, 3, 5)), sparse_methods(DEMO, load_model(DEMO)), lambda: None
    )
    found = {row.name: row for row in rows}
    assert set(found) >= {"sparse layers", "sparse layers, cachegen 2", "sparse 75", "sparse 50", "sparse 20"}
    whole, best, coded, least = (
        found[name] for name in (PREFILL, "sparse layers", "sparse layers, cachegen 2", "sparse 20")
    )
    assert 2 <= best.bytes_ratio < least.bytes_ratio < coded.bytes_ratio
    assert best.kl < 0.01 < 0.1 < least.kl
    assert best.cells["one hop"].right >= whole.cells["one hop"].right - 1
    assert least.cells["one hop"].right < whole.cells["one hop"].right - 2


class Loud:
    """A sparse level whose dropped tokens shout: who keeps to what is kept does not hear them."""

    name, computed = "loud", 0.0

    def __init__(self, level: Any) -> None:
        self.level, self.bytes_ratio = level, 1.0

    def kv(self, model: Any, case: Case, full: Prefill) -> MaskedKV:
        """See `Method`."""
        found: MaskedKV = self.level.kv(model, case, full)
        kept = found.kept.transpose(1, 2)[:, None, ..., None]
        return found._replace(kv=torch.where(kept, found.kv, torch.full((), 50.0, dtype=found.kv.dtype)))


def test_what_is_dropped_is_not_attended_to(tokenizer: Any) -> None:
    cases = list(demo_cases(tokenizer, 1, 6))
    _, quiet, loud = measure(
        load_model(DEMO), cases, [level := sparse_methods(DEMO, load_model(DEMO))[0], Loud(level)], lambda: None
    )
    assert loud.kl == pytest.approx(quiet.kl, abs=1e-9)


def test_a_model_that_nobody_calibrated_has_the_uniform_levels(tmp_path: Path) -> None:
    names = [row.name for row in sparse_methods(tmp_path, load_model(PROBE))]
    assert names == ["sparse 75", "sparse 50", "sparse 20", "sparse 50, cachegen 2"]


def test_bytes_and_what_is_computed_are_counted(probe_rows: dict[str, Row]) -> None:
    assert 1.3 < probe_rows["exact, lossless"].bytes_ratio < 2
    assert probe_rows["cachegen 3"].bytes_ratio > probe_rows["cachegen 1"].bytes_ratio > 3
    assert probe_rows["exact, lossless"].computed == 0
    shares = [probe_rows[name].computed for name in ("naive reuse of documents", "blended, check layer 2, ratio 0.15")]
    assert 0 < shares[0] < shares[1] < 1


def test_the_interval_is_wilsons() -> None:
    assert Cell(240, 240).interval == pytest.approx((0.98424, 1.0), abs=1e-4)
    assert Cell(5, 10).interval == pytest.approx((0.23659, 0.76341), abs=1e-4)


def made_rows() -> list[Row]:
    rows = [Row(PREFILL), Row("cachegen 1", divergences=[torch.tensor([0.25])], bytes_ratio=1.88, computed=0.0)]
    rows[0].cells["one hop"], rows[1].cells["one hop"] = Cell(10, 10), Cell(9, 10)
    return rows


def test_table_intervals_and_plot_hold_every_row(tmp_path: Path) -> None:
    by_model = {"demo": made_rows()}
    text = quality.table(by_model)
    assert "| whole prefill | 1.00 | 100% | 10/10 |  |" in text
    assert "| cachegen 1 | 1.88 | 0% | 9/10 | 0.25000 |" in text
    assert "Demo, one hop 72.2% to 100.0%" in quality.intervals(by_model)
    timed = quality.table(by_model, FirstTokens("a machine", {"cachegen 1": [0.125]}))
    assert "| demo | bf16 ÷ bytes | computed | TTFT ÷ prefill | one hop | KL |" in timed
    assert "| cachegen 1 | 1.88 | 0% | 0.125 | 9/10 | 0.25000 |" in timed
    quality.plot(by_model, tmp_path / "quality.png")
    assert (tmp_path / "quality.png").stat().st_size > 1000


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """The command, with the measuring left out."""
    monkeypatch.setattr(quality, "rows_of", lambda *_: made_rows())
    app = typer.Typer()
    app.command()(quality.main)
    return lambda *arguments: CliRunner().invoke(app, list(arguments))


def test_the_page_gets_table_and_plot_and_json_all_numbers(
    command: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "compression.md"
    page.write_text(f"before\n\n{quality.PLACE.begin}\nold\n{quality.PLACE.end}\n\nafter\n")
    monkeypatch.setattr(quality, "PLACE", replace(quality.PLACE, page=page))
    monkeypatch.setattr(quality, "PLOT", page.with_name("quality.png"))
    result = command("--write-docs", "--json", str(tmp_path / "all.json"))
    assert result.exit_code == 0, result.output
    text = page.read_text()
    assert "old" not in text
    assert text.count("| cachegen 1 | 1.88 |") == 2
    assert page.with_name("quality.png").exists()
    found = json.loads((tmp_path / "all.json").read_text())
    assert found["demo"][1]["right"]["one hop"]["right"] == 9
    assert set(found) == {"demo", "probe", "first_tokens", "seed", "conversations"}


def test_a_model_without_questions_wants_prompts(command: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    result = command("--model", str(tmp_path))
    assert result.exit_code == 2
    assert "--prompts" in result.output


def test_the_committed_page_has_a_place_for_the_table() -> None:
    text = quality.PAGE.read_text()
    assert quality.PLACE.begin in text
    assert quality.PLACE.end in text
    assert set(KINDS) >= {"one hop", "two hops", "distractors", "copied", "joined hops"}
