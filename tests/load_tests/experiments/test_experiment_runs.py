"""A run of the study: engine by engine, going on after a stop, what fails, and the command line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from load_tests.experiments import __main__ as program
from load_tests.experiments.__main__ import EXPERIMENTS
from load_tests.experiments.experiment import Point
from load_tests.experiments.runner import in_engine_order, run_points
from load_tests.experiments.sizes import EngineSpec
from load_tests.harness.engine_process import EngineError
from load_tests.measuring.journal import Journal
from tests.load_tests.experiments.fake_engine import SIZES, FakeEngine, measured


def point(engine: Any, first: bool = False, **values: Any) -> Point:
    return Point("e", engine.model if engine else "p", engine, values, first)


def test_points_of_one_engine_follow_each_other_and_models_do_too() -> None:
    plain, tiered, other = (
        EngineSpec("a", "float32"),
        EngineSpec("a", "float32", tiered=True),
        EngineSpec("b", "float32"),
    )
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
    run_points(planned, EXPERIMENTS, Journal[Point](tmp_path / "points.jsonl"), start, lambda point, done: None)
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
        run_points(planned, EXPERIMENTS, Journal[Point](path), lambda spec: engine, stop_at_third)
    assert engine.closed == [True]
    assert len(path.read_text().splitlines()) == 2
    seen: list[str] = []
    run_points(
        planned, EXPERIMENTS, Journal[Point](path), FakeEngine, lambda one, done: None if done else seen.append(one.key)
    )
    assert seen == [one.key for one in planned[2:]]
    assert len(Journal[Point](path).of(planned)) == len(planned)


def test_fresh_forgets_only_what_is_measured_anew(tmp_path: Path) -> None:
    journal = Journal[Point](tmp_path / "points.jsonl")
    measured(journal, ["prefill_share", "micro_batch"])
    share, batch = (EXPERIMENTS[name].points(SIZES) for name in ("prefill_share", "micro_batch"))
    journal.forget(share)
    assert Journal[Point](journal.path).of(share) == []
    assert len(Journal[Point](journal.path).of(batch)) == len(batch)


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
    journal = Journal[Point](tmp_path / "points.jsonl")
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
def test_an_unknown_name_is_answered_with_the_known_ones(arguments: list[str], says: str) -> None:
    found = invoke(*arguments)
    assert found.exit_code == 2
    assert says in found.stderr


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
    def fake(wanted: list[Point], journal: Journal[Point], log: Path) -> list[str]:
        return run_points(wanted, EXPERIMENTS, journal, FakeEngine, lambda point, done: None)

    monkeypatch.setattr(program, "measure", fake)
    arguments = ["--quick", "--only", "micro_batch", "--state", str(tmp_path), "--json", str(tmp_path / "report.json")]
    assert invoke(*arguments).exit_code == 0
    found = json.loads((tmp_path / "report.json").read_text())
    assert found["experiments"]["micro_batch"]["points"]["measured"] == 9
    assert found["experiments"]["swap"]["conclusion"] == "Not measured yet."
    assert "Micro-batch size" in (tmp_path / "quick" / "experiments_report.md").read_text()
    monkeypatch.setattr(program, "measure", lambda *_: ["swap of 10m was not measured: it broke"])
    assert invoke(*arguments).exit_code == 1
