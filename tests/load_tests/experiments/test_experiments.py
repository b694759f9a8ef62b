"""The study without engines: points, formula, sentences from made-up rows, report."""

from __future__ import annotations

import csv
import re
from pathlib import Path
from typing import Any

import pytest

from configs.settings import Settings
from load_tests.experiments import batches, memory, prefill, report
from load_tests.experiments.__main__ import EXPERIMENTS
from load_tests.experiments.columns import Column
from load_tests.experiments.experiment import Point, sampled, spread
from load_tests.experiments.report import Result, write_report
from load_tests.experiments.runner import run_points
from load_tests.experiments.sizes import Sizes, fast_dtype, longest_prompt
from load_tests.measuring.journal import Journal
from tests.load_tests.experiments.fake_engine import SIZES, FakeEngine, measured


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    return measured(Journal[Point](tmp_path_factory.mktemp("state") / "points.jsonl"))


def conclusion_of(name: str, rows: list[dict[str, Any]]) -> str:
    return EXPERIMENTS[name].conclusion(rows)


def test_there_are_the_experiments_of_the_study_over_three_shapes() -> None:
    assert list(EXPERIMENTS) == [
        "prefill_share", "prefill_length", "output_share", "kv_bytes", "batch_limits", "micro_batch", "reuse_latency",
        "reuse_memory", "swap", "tokens_per_pass",
    ]  # fmt: skip
    for experiment in EXPERIMENTS.values():
        assert {point.model for point in experiment.points(SIZES)} >= set(SIZES.models)


def test_the_study_computes_in_the_type_that_the_processor_computes_fast(each_processor: str) -> None:
    assert fast_dtype() == each_processor


def test_no_two_points_have_one_key_and_every_engine_knows_its_model() -> None:
    points = [point for experiment in EXPERIMENTS.values() for point in experiment.points(SIZES)]
    assert len({point.key for point in points}) == len(points)
    assert all(point.engine is None or point.engine.model == point.model for point in points)


def test_every_sentence_names_its_setting_which_there_is(results: list[Result]) -> None:
    settings = Settings().model_dump()
    for result in results:
        found: Any = settings
        for part in result.experiment.setting.split("."):
            found = found[part]
        assert f"`{result.experiment.setting}" in result.conclusion or result.experiment.setting in result.conclusion
        for sentence in re.split(r"[.:]\s|\n", result.conclusion):
            assert len(sentence.split()) <= 30, sentence


def test_the_report_holds_every_question_table_plot_and_sentence(
    results: list[Result], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Path] = []
    monkeypatch.setattr(report, "draw", lambda path, result: drawn.append(path))
    write_report(tmp_path / "experiments.md", results, SIZES, "python -m load_tests.experiments --quick")
    text = (tmp_path / "experiments.md").read_text()
    assert "`python -m load_tests.experiments --quick` — **quick" in text
    for result in results:
        name = result.experiment.name
        assert result.experiment.question in text
        assert " ".join(result.conclusion.split()) in " ".join(text.split())
        assert f"(experiments/{name}.png)" in text
        assert tmp_path / "experiments" / f"{name}.png" in drawn
        with (tmp_path / "experiments" / f"{name}.csv").open() as stream:
            rows = list(csv.DictReader(stream))
        assert len(rows) == len(result.rows) > 0
        assert {column.key for column in result.experiment.columns} <= set(rows[0])


def test_every_experiment_has_a_plot_with_labels(results: list[Result]) -> None:
    from matplotlib.figure import Figure  # not for each process that collects tests

    for result in results:
        figure = Figure()
        result.experiment.plot(result.rows, figure)
        assert figure.axes
        assert all(axes.get_ylabel() and (axes.lines or axes.patches) for axes in figure.axes)


def test_an_experiment_without_points_says_so_and_missing_points_are_counted(tmp_path: Path) -> None:
    experiment = EXPERIMENTS["prefill_share"]
    planned = experiment.points(SIZES)
    assert Result(experiment, len(planned), []).conclusion == "Not measured yet."
    journal = Journal[Point](tmp_path / "points.jsonl")
    run_points(planned[:1], EXPERIMENTS, journal, FakeEngine, lambda point, done: None)
    partial = Result(experiment, len(planned), journal.of(planned))
    assert f"({len(planned) - 1} of {len(planned)} points are missing.)" in partial.conclusion


@pytest.mark.parametrize(
    ("model", "tokens", "mib"),
    [("Llama-3.1-8B", 1024, 128), ("Llama-2-7B", 4096, 2048), ("Qwen2.5-7B", 1024, 56), ("Llama-3.1-70B", 1024, 320)],
)
def test_kv_bytes_of_published_shapes_are_those_of_the_formula(model: str, tokens: int, mib: int) -> None:
    assert memory.formula_bytes(model, tokens) == mib << 20


def test_kv_in_float32_weighs_twice_and_is_another_measurement() -> None:
    assert memory.formula_bytes("10m", 100, 4) == 2 * memory.formula_bytes("10m", 100)
    both = [Sizes(SIZES.models, SIZES.longest, dtype).engine("10m") for dtype in ("bfloat16", "float32")]
    assert len({Point("e", "10m", spec, {}).key for spec in both}) == 2


def test_measured_kv_within_a_block_of_the_formula_agrees_and_more_does_not() -> None:
    per_token = memory.formula_bytes("10m", 1)
    row = {"model": "10m", "prompt_tokens": 100, "formula_bytes": 100 * per_token}
    assert "in whole blocks" in conclusion_of("kv_bytes", [row | {"measured_bytes": 128 * per_token}])
    assert "more than a block" in conclusion_of("kv_bytes", [row | {"measured_bytes": 160 * per_token}])


def test_the_fit_finds_fixed_linear_and_quadratic_cost_again() -> None:
    rows = [
        {"model": "m", "prompt_tokens": n, "prefill_s": 0.02 + 1e-3 * n + 1e-7 * n * n / 2}
        for n in (16, 128, 512, 1024, 4096, 16384)
    ]
    assert prefill.fitted(rows) == pytest.approx((0.02, 1e-3, 1e-7), rel=1e-6)
    straight = [row | {"prefill_s": 1e-3 * row["prompt_tokens"]} for row in rows]
    assert prefill.fitted(straight) == pytest.approx((0, 1e-3, 0), abs=1e-9)


def test_a_large_fixed_cost_speaks_against_the_segments_length() -> None:
    def sentence(fixed: float) -> str:
        rows = [{"model": "m", "prompt_tokens": n, "prefill_s": fixed + 1e-3 * n} for n in (16, 128, 512, 1024)]
        return conclusion_of("prefill_length", rows)

    assert "the default stays" in sentence(0.01)
    assert "a longer segment" in sentence(5.0)


@pytest.mark.parametrize(("share", "says"), [(0.6, "stays on by default"), (0.05, "little to save")])
def test_the_first_sentence_follows_the_share(share: float, says: str) -> None:
    row = {"model": "m", "prompt_tokens": 128, "answer_tokens": 128, "share": share}
    assert says in conclusion_of("prefill_share", [row])


def test_where_decoding_takes_over_is_the_first_answer_with_less_than_half() -> None:
    rows = [
        {"model": "m", "prompt_tokens": 1000, "answer_tokens": answer, "share": share, "total_s": 1.0}
        for answer, share in ((10, 0.9), (100, 0.45), (500, 0.1))
    ]
    assert "10.0 % (m)" in conclusion_of("output_share", rows)


def test_kv_caps_the_batch_that_fills_the_pool() -> None:
    rows = [{"batch": batch, "kv_bytes": 5 * min(batch, 10), "pool_bytes": 50} for batch in (1, 4, 8, 16, 32)]
    assert batches.capped_batch(rows) == 16
    assert batches.capped_batch(rows[:3]) is None


@pytest.mark.parametrize(("decode_s", "says"), [(0.02, "stays"), (0.4, "does not pay")])
def test_a_batch_pays_where_a_decode_step_grows_less_than_the_batch(decode_s: float, says: str) -> None:
    first = {"model": "m", "batch": 1, "prefill_s": 0.1, "decode_s": 0.01}
    assert says in conclusion_of(
        "micro_batch", [first, {"model": "m", "batch": 32, "prefill_s": 3.0, "decode_s": decode_s}]
    )


def test_the_token_budget_is_the_fewest_tokens_near_the_best_rate() -> None:
    rates = {1: 100, 64: 1000, 256: 1850, 1024: 2000, 4096: 1990}
    rows = [{"model": "m", "tokens": n, "tokens_per_s": rate, "pass_s": n / rate} for n, rate in rates.items()]
    assert batches.saturating_tokens(rows) == 256
    assert "saturates every model" in conclusion_of("tokens_per_pass", rows)
    early = [row | {"tokens_per_s": 2000} for row in rows[1:]]
    assert "64 would do so with shorter waits" in conclusion_of("tokens_per_pass", early)
    late = [row | {"tokens_per_s": row["tokens"]} for row in rows]
    assert "4,096 would not" in conclusion_of("tokens_per_pass", late)


def test_a_source_that_is_slower_than_computing_is_named() -> None:
    def rows(redis_ratio: float) -> list[dict[str, Any]]:
        ratios = {"none": 1.0, "device": 0.1, "cpu": 0.2, "redis": redis_ratio}
        return [
            {"model": "m", "prompt_tokens": 512, "source": source, "ttft_ratio": ratio, "total_ratio": 0.5}
            for source, ratio in ratios.items()
        ]

    assert "redis at 512 (m)" in conclusion_of("reuse_latency", rows(1.4))
    assert "paid at every length" in conclusion_of("reuse_latency", rows(0.4))


def test_memory_needs_both_arms_for_a_sentence() -> None:
    arm = {
        "model": "m",
        "reuse": "with",
        "idle_engine_bytes": 1 << 30,
        "idle_other_bytes": 1 << 30,
        "kept_tokens": 1024,
        "cpu_tier_bytes": 4 << 20,
    }
    plain = arm | {"reuse": "without", "idle_other_bytes": 0}
    assert "both arms" in conclusion_of("reuse_memory", [arm]).lower()
    assert "takes 1,024 MiB (m) more" in conclusion_of("reuse_memory", [plain, arm])
    assert "262,144 tokens (m)" in conclusion_of("reuse_memory", [plain, arm])


def test_the_report_shows_values_from_end_to_end_and_every_row_of_them() -> None:
    rows = [{"model": model, "n": n, "arm": arm} for model in "ab" for n in (1, 2, 3, 4, 5) for arm in "xy"]
    shown = sampled(rows, "n", 3)
    assert [row["n"] for row in shown if row["model"] == "b"] == [1, 1, 3, 3, 5, 5]
    assert sampled(rows, "n", 9) == rows
    assert sampled(rows[:2], "n", 3) == rows[:2]


def test_a_cell_is_scaled_and_has_its_spread_beside_it() -> None:
    row = {"model": "m", **spread("s", [0.1, 0.3, 0.2]), "none": None}
    assert Column("s", "ms", 1e3, 0, spread=True).cell(row) == "200 (100\u2013300)"
    assert Column("model", "model").cell(row) == "m"
    assert Column("none", "x").cell(row) == Column("gone", "x").cell(row) == ""


def test_large_models_have_shorter_prompts() -> None:
    assert longest_prompt(10_000_000, quick=False) == 16384
    assert longest_prompt(365_000_000, quick=False) < 16384
    assert longest_prompt(10_000_000, quick=True) < longest_prompt(10_000_000, quick=False)
    assert max(SIZES.tiered_prompts("10m")) <= 4096
