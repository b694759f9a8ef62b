"""The study without engines: points, formula, sentences from made-up rows, going on after a stop, errors, report."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from matplotlib.figure import Figure
from typer.testing import CliRunner

from configs.settings import Settings
from load_tests.experiments import __main__ as program
from load_tests.experiments import (
    batch_limits,
    kv_bytes,
    micro_batch,
    output_share,
    prefill_length,
    prefill_share,
    report,
    reuse_latency,
    reuse_memory,
    rounds,
    swap,
    swap_compressed,
    tokens_per_pass,
)
from load_tests.experiments.catalogue import EXPERIMENTS
from load_tests.experiments.engine_specs import PlainSpec, TieredSpec
from load_tests.experiments.experiment import Column, Point, sampled, spread
from load_tests.experiments.journal import Entry, Journal
from load_tests.experiments.report import Result, write_report
from load_tests.experiments.runner import in_engine_order, run_points
from load_tests.experiments.sizes import Sizes, longest_prompt
from load_tests.harness.engine_process import EngineError

SIZES = Sizes(("10m", "40m", "365m"), {"10m": 2048, "40m": 2048, "365m": 512}, "bfloat16", 2, quick=True)


class FakeEngine:
    """Answers as the engines' hosts do, at a rate of 1,000 tokens a second; each decode step takes 10 ms."""

    def __init__(self, spec: Any = None) -> None:
        self.spec = spec
        self.calls: list[str] = []
        self.closed: list[bool] = []

    def call(self, method: str, **named: Any) -> Any:
        self.calls.append(method)
        return getattr(self, method)(**named)

    def memory_bytes(self) -> tuple[int, int]:
        return (700 << 20, 0) if isinstance(self.spec, PlainSpec) else (750 << 20, 900 << 20)

    def cpu_s(self) -> float:
        return 0.0

    def close(self, at_once: bool = False) -> None:
        self.closed.append(at_once)

    def kv_bytes_per_block(self) -> int:
        return 32 * kv_bytes.formula_bytes("10m", 1)

    def run(self, prompts: list[int], max_tokens: int, step_tokens: int = 2048, pool_blocks: int = 639) -> Any:
        first = sum(prompts) / 1000
        times = [[first + 0.01 * token for token in range(max_tokens)] for _ in prompts]
        held = min(pool_blocks, sum(-(-(tokens + max_tokens) // 32) for tokens in prompts))
        running = min(len(prompts), pool_blocks * 32 // (prompts[0] + max_tokens))
        steps = [(sum(prompts), running, first, held)] + [(len(prompts), running, 0.01, held)] * (max_tokens - 1)
        return {"requests": times, "steps": steps}

    def round(self, tokens: int, max_tokens: int, codec: str = "raw") -> Any:
        seconds = {"none": tokens / 1000, "device": 0.01, "cpu": 0.02, "redis": 0.05}
        found: dict[str, Any] = {
            source: {
                "ttft_s": first,
                "seconds": first + 0.01 * max_tokens,
                "reused": 0 if source == "none" else tokens - 32,
            }
            for source, first in seconds.items()
        }
        stored = tokens * 1000 // {"raw": 1, "lossless": 1.5, "int8": 2, "cachegen": 7}[codec]
        return found | {"out": {"cpu": 0.03, "redis": 0.06}, "bytes": {"cpu": tokens * 1000, "redis": stored}}

    def fill(self, prompts: int, tokens: int) -> dict[str, int]:
        return {"cpu": prompts * tokens * 4096, "redis": prompts * tokens * 3000}


def measured(journal: Journal, only: list[str] | None = None) -> list[Result]:
    planned = {name: one.points(SIZES) for name, one in EXPERIMENTS.items() if not only or name in only}
    points = [point for found in planned.values() for point in found]
    assert run_points(points, EXPERIMENTS, journal, FakeEngine, lambda point, done: None) == []
    return [Result(EXPERIMENTS[name], len(found), journal.of(found)) for name, found in planned.items()]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Result]:
    return measured(Journal(tmp_path_factory.mktemp("state") / "points.jsonl"))


def test_there_are_the_eleven_experiments_of_the_study_over_three_shapes() -> None:
    assert list(EXPERIMENTS) == [
        "prefill_share", "prefill_length", "output_share", "kv_bytes", "batch_limits", "micro_batch", "reuse_latency",
        "reuse_memory", "swap", "swap_compressed", "tokens_per_pass",
    ]  # fmt: skip
    for experiment in EXPERIMENTS.values():
        assert {point.model for point in experiment.points(SIZES)} >= set(SIZES.models)


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
    for result in results:
        figure = Figure()
        result.experiment.plot(result.rows, figure)
        assert figure.axes
        assert all(axes.get_ylabel() and (axes.lines or axes.patches) for axes in figure.axes)


def test_an_experiment_without_points_says_so_and_missing_points_are_counted(tmp_path: Path) -> None:
    experiment = EXPERIMENTS["prefill_share"]
    planned = experiment.points(SIZES)
    assert Result(experiment, len(planned), []).conclusion == "Not measured yet."
    journal = Journal(tmp_path / "points.jsonl")
    run_points(planned[:1], EXPERIMENTS, journal, FakeEngine, lambda point, done: None)
    partial = Result(experiment, len(planned), journal.of(planned))
    assert f"({len(planned) - 1} of {len(planned)} points are missing.)" in partial.conclusion


@pytest.mark.parametrize(
    ("model", "tokens", "mib"),
    [("Llama-3.1-8B", 1024, 128), ("Llama-2-7B", 4096, 2048), ("Qwen2.5-7B", 1024, 56), ("Llama-3.1-70B", 1024, 320)],
)
def test_kv_bytes_of_published_shapes_are_those_of_the_formula(model: str, tokens: int, mib: int) -> None:
    assert kv_bytes.formula_bytes(model, tokens) == mib << 20


def test_kv_in_float32_weighs_twice_and_is_another_measurement() -> None:
    assert kv_bytes.formula_bytes("10m", 100, 4) == 2 * kv_bytes.formula_bytes("10m", 100)
    both = [Sizes(SIZES.models, SIZES.longest, dtype).plain("10m") for dtype in ("bfloat16", "float32")]
    assert len({Point("e", "10m", spec, {}).key for spec in both}) == 2


def test_measured_kv_within_a_block_of_the_formula_agrees_and_more_does_not() -> None:
    per_token = kv_bytes.formula_bytes("10m", 1)
    row = {"model": "10m", "prompt_tokens": 100, "formula_bytes": 100 * per_token}
    assert "in whole blocks" in kv_bytes.conclusion([row | {"measured_bytes": 128 * per_token}])
    assert "more than a block" in kv_bytes.conclusion([row | {"measured_bytes": 160 * per_token}])


def test_the_fit_finds_fixed_linear_and_quadratic_cost_again() -> None:
    rows = [
        {"model": "m", "prompt_tokens": n, "prefill_s": 0.02 + 1e-3 * n + 1e-7 * n * n / 2}
        for n in (16, 128, 512, 1024, 4096, 16384)
    ]
    assert prefill_length.fitted(rows) == pytest.approx((0.02, 1e-3, 1e-7), rel=1e-6)
    straight = [row | {"prefill_s": 1e-3 * row["prompt_tokens"]} for row in rows]
    assert prefill_length.fitted(straight) == pytest.approx((0, 1e-3, 0), abs=1e-9)


def test_a_large_fixed_cost_speaks_against_the_segments_length() -> None:
    def sentence(fixed: float) -> str:
        rows = [{"model": "m", "prompt_tokens": n, "prefill_s": fixed + 1e-3 * n} for n in (16, 128, 512, 1024)]
        return prefill_length.conclusion(rows)

    assert "the default stays" in sentence(0.01)
    assert "a longer segment" in sentence(5.0)


@pytest.mark.parametrize(("share", "says"), [(0.6, "stays on by default"), (0.05, "little to save")])
def test_the_first_sentence_follows_the_share(share: float, says: str) -> None:
    row = {"model": "m", "prompt_tokens": 128, "answer_tokens": 128, "share": share}
    assert says in prefill_share.conclusion([row])


def test_where_decoding_takes_over_is_the_first_answer_with_less_than_half() -> None:
    rows = [
        {"model": "m", "prompt_tokens": 1000, "answer_tokens": answer, "share": share, "total_s": 1.0}
        for answer, share in ((10, 0.9), (100, 0.45), (500, 0.1))
    ]
    assert "10.0 % (m)" in output_share.conclusion(rows)


def test_kv_caps_the_batch_that_fills_the_pool() -> None:
    rows = [{"batch": batch, "kv_bytes": 5 * min(batch, 10), "pool_bytes": 50} for batch in (1, 4, 8, 16, 32)]
    assert batch_limits.capped_batch(rows) == 16
    assert batch_limits.capped_batch(rows[:3]) is None


@pytest.mark.parametrize(("decode_s", "says"), [(0.02, "stays"), (0.4, "does not pay")])
def test_a_batch_pays_where_a_decode_step_grows_less_than_the_batch(decode_s: float, says: str) -> None:
    first = {"model": "m", "batch": 1, "prefill_s": 0.1, "decode_s": 0.01}
    assert says in micro_batch.conclusion([first, {"model": "m", "batch": 32, "prefill_s": 3.0, "decode_s": decode_s}])


def test_the_token_budget_is_the_fewest_tokens_near_the_best_rate() -> None:
    rates = {1: 100, 64: 1000, 256: 1850, 1024: 2000, 4096: 1990}
    rows = [{"model": "m", "tokens": n, "tokens_per_s": rate, "pass_s": n / rate} for n, rate in rates.items()]
    assert tokens_per_pass.saturating_tokens(rows) == 256
    assert "saturates every model" in tokens_per_pass.conclusion(rows)
    early = [row | {"tokens_per_s": 2000} for row in rows[1:]]
    assert "64 would do so with shorter waits" in tokens_per_pass.conclusion(early)
    late = [row | {"tokens_per_s": row["tokens"]} for row in rows]
    assert "4,096 would not" in tokens_per_pass.conclusion(late)


def test_a_source_that_is_slower_than_computing_is_named() -> None:
    def rows(redis_ratio: float) -> list[dict[str, Any]]:
        ratios = {"none": 1.0, "device": 0.1, "cpu": 0.2, "redis": redis_ratio}
        return [
            {"model": "m", "prompt_tokens": 512, "source": source, "ttft_ratio": ratio, "total_ratio": 0.5}
            for source, ratio in ratios.items()
        ]

    assert "redis at 512 (m)" in reuse_latency.conclusion(rows(1.4))
    assert "paid at every length" in reuse_latency.conclusion(rows(0.4))


def test_swap_says_from_which_length_on_a_tier_wins() -> None:
    rows = [
        {"model": "m", "prompt_tokens": n, "cpu_ratio": cpu, "redis_ratio": redis}
        for n, cpu, redis in ((512, 0.5, 1.5), (1024, 0.3, 0.9))
    ]
    sentence = swap.conclusion(rows)
    assert "the CPU tier from 512 tokens on" in sentence
    assert "Redis from 1,024 tokens on, 0.90" in sentence
    assert "stays `auto`" in sentence
    assert "`load` would do as well" in swap.conclusion(rows[1:])
    assert "Redis never" in swap.conclusion(rows[:1])


@pytest.mark.parametrize(("seconds", "says"), [(0.1, "costs nothing noticeable"), (0.2, "room")])
def test_compression_is_judged_against_raw(seconds: float, says: str) -> None:
    row = {"model": "m", "prompt_tokens": 512, "times_smaller": 1.0, "redis_ttft_s": 0.1, "codec": "raw"}
    coded = row | {"codec": "lossless", "times_smaller": 1.5, "redis_ttft_s": seconds}
    assert says in swap_compressed.conclusion([row, coded])
    assert "both needed" in swap_compressed.conclusion([row])


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
    assert "both arms" in reuse_memory.conclusion([arm]).lower()
    assert "takes 1,024 MiB (m) more" in reuse_memory.conclusion([plain, arm])
    assert "262,144 tokens (m)" in reuse_memory.conclusion([plain, arm])


def test_a_load_that_missed_its_deadline_shows_as_less_reuse() -> None:
    found = [{"device": {"reused": 992}, "redis": {"reused": reused}} for reused in (992, 496)]
    assert rounds.least_reused(found, "redis") == 0.5


def test_the_report_shows_values_from_end_to_end_and_every_row_of_them() -> None:
    rows = [{"model": model, "n": n, "arm": arm} for model in "ab" for n in (1, 2, 3, 4, 5) for arm in "xy"]
    shown = sampled("n", 3)(rows)
    assert [row["n"] for row in shown if row["model"] == "b"] == [1, 1, 3, 3, 5, 5]
    assert sampled("n", 9)(rows) == rows
    assert sampled("n", 3)(rows[:2]) == rows[:2]


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


def point(engine: Any, first: bool = False, **values: Any) -> Point:
    return Point("e", engine.model if engine else "p", engine, values, first)


def test_points_of_one_engine_follow_each_other_and_models_do_too() -> None:
    plain, tiered, other = PlainSpec("a", "float32"), TieredSpec("a", "float32"), PlainSpec("b", "float32")
    points = [point(plain, n=1), point(other, n=2), point(tiered, n=3), point(plain, n=4), point(tiered, True, n=5)]
    ordered = [one.values["n"] for one in in_engine_order([*points, point(None, n=6)])]
    assert ordered == [6, 1, 4, 5, 3, 2]


def test_each_engine_starts_once_and_ends_before_the_next_one_starts(tmp_path: Path) -> None:
    started: list[FakeEngine] = []

    def start(spec: Any) -> FakeEngine:
        assert all(engine.closed for engine in started)
        started.append(FakeEngine(spec))
        return started[-1]

    planned = [one for experiment in EXPERIMENTS.values() for one in experiment.points(SIZES)]
    run_points(planned, EXPERIMENTS, Journal(tmp_path / "points.jsonl"), start, lambda point, done: None)
    assert len(started) == len({one.engine for one in planned if one.engine}) == 6
    assert [engine.closed for engine in started] == [[False]] * 6


def test_a_stopped_run_keeps_what_it_has_and_goes_on_there(tmp_path: Path) -> None:
    planned = EXPERIMENTS["prefill_share"].points(SIZES)
    path = tmp_path / "points.jsonl"
    engine = FakeEngine()

    def stop_at_third(one: Point, done: bool) -> None:
        if one.key == planned[2].key and not done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_points(planned, EXPERIMENTS, Journal(path), lambda spec: engine, stop_at_third)
    assert engine.closed == [True]
    assert len(path.read_text().splitlines()) == 2
    seen: list[str] = []
    run_points(
        planned, EXPERIMENTS, Journal(path), FakeEngine, lambda one, done: None if done else seen.append(one.key)
    )
    assert seen == [one.key for one in planned[2:]]
    assert len(Journal(path).of(planned)) == len(planned)


def test_a_line_that_was_cut_off_is_measured_again_and_spoils_no_other(tmp_path: Path) -> None:
    planned = EXPERIMENTS["prefill_share"].points(SIZES)[:2]
    path = tmp_path / "points.jsonl"
    journal = Journal(path)
    for one in planned:
        journal.add(Entry(one.key, [{"model": one.model}], 0.0, "2026-01-01"))
    path.write_text(path.read_text()[:-20])
    again = Journal(path)
    assert [again.has(one) for one in planned] == [True, False]
    again.add(Entry(planned[1].key, [], 0.0, "2026-01-01"))
    assert [Journal(path).has(one) for one in planned] == [True, True]


def test_fresh_forgets_only_what_is_measured_anew(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "points.jsonl")
    measured(journal, ["prefill_share", "micro_batch"])
    share, batch = (EXPERIMENTS[name].points(SIZES) for name in ("prefill_share", "micro_batch"))
    journal.forget(share)
    assert Journal(journal.path).of(share) == []
    assert len(Journal(journal.path).of(batch)) == len(batch)


def test_a_point_that_fails_does_not_end_the_run_and_an_engine_that_does_not_start_is_tried_once(
    tmp_path: Path,
) -> None:
    starts: list[str] = []

    class Failing(FakeEngine):
        def run(self, prompts: list[int], *args: Any, **named: Any) -> Any:
            if prompts == [128]:
                raise EngineError("it broke")
            return super().run(prompts, *args, **named)

    def start(spec: Any) -> FakeEngine:
        starts.append(spec.model)
        if spec.model == "40m":
            raise EngineError("no memory")
        return Failing(spec)

    planned = EXPERIMENTS["prefill_share"].points(SIZES)
    journal = Journal(tmp_path / "points.jsonl")
    failures = run_points(planned, EXPERIMENTS, journal, start, lambda point, done: None)
    of_40m = sum(one.model == "40m" for one in planned)
    assert sum("it broke" in failure for failure in failures) == 2
    assert sum("no memory" in failure for failure in failures) == of_40m
    assert starts.count("40m") == 1
    assert len(journal.of(planned)) == len(planned) - of_40m - 2


def invoke(*arguments: str) -> Any:
    app = typer.Typer()
    app.command()(program.main)
    return CliRunner().invoke(app, list(arguments))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--only", "prefil"], "There is no experiment 'prefil'; choose from prefill_share, "),
        (["--model", "7b"], "There is no model '7b'; choose from 10m, 40m, 365m."),
    ],
)
def test_an_unknown_name_is_answered_with_the_known_ones(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(typer.Exit) as ended:
        program.chosen(
            arguments[1:], list(EXPERIMENTS) if arguments[0] == "--only" else ["10m", "40m", "365m"],
            "experiment" if arguments[0] == "--only" else "model",
        )  # fmt: skip
    assert ended.value.exit_code == 2
    assert invoke(*arguments).exit_code == 2
    assert says in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--docs", "--state", "--json"])
def test_a_folder_that_cannot_be_written_is_said_before_anything_is_measured(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(program, "measure", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr(program, "STATE", tmp_path / "state")
    said: list[str] = []
    monkeypatch.setattr(program.out, "print", lambda text, **_: said.append(text))
    (tmp_path / "file").write_text("")
    folders = {"--docs": tmp_path / "docs", "--state": tmp_path / "state"}
    folders[option] = tmp_path / "file" / "below"
    found = invoke(*(str(word) for pair in folders.items() for word in pair))
    assert found.exit_code == 2
    assert len(said) == 1
    assert option in said[0]


def test_ctrl_c_says_what_is_kept_and_how_to_go_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> list[str]:
        raise KeyboardInterrupt

    monkeypatch.setattr(program, "measure", stop)
    said: list[str] = []
    monkeypatch.setattr(program.out, "print", lambda text, **_: said.append(text))
    found = invoke("--quick", "--state", str(tmp_path))
    assert found.exit_code == 130
    assert len(said) == 1
    assert "are kept in" in said[0]
    assert "the same command goes on" in said[0]


def test_the_program_writes_report_and_json_and_fails_when_points_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fake(wanted: list[Point], journal: Journal, log: Path) -> list[str]:
        return run_points(wanted, EXPERIMENTS, journal, FakeEngine, lambda point, done: None)

    monkeypatch.setattr(program, "measure", fake)
    arguments = ["--quick", "--only", "micro_batch", "--state", str(tmp_path), "--json", str(tmp_path / "report.json")]
    assert invoke(*arguments).exit_code == 0
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["experiments"]["micro_batch"]["points"]["measured"] == 9
    assert found["experiments"]["swap"]["conclusion"] == "Not measured yet."
    assert "Micro-batch size" in (tmp_path / "quick" / "experiments.md").read_text()
    monkeypatch.setattr(program, "measure", lambda *_: ["swap of 10m was not measured: it broke"])
    assert invoke(*arguments).exit_code == 1
