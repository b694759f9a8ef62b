"""One way to measure, without anything to measure."""

from __future__ import annotations

import json
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import pytest
import typer

from load_tests.measuring import plots, processes, program, report
from load_tests.measuring.comparison import Bound, Comparison
from load_tests.measuring.journal import Journal
from load_tests.measuring.spread import Spread, number, percentile, ratios
from load_tests.measuring.turns import rotated, turns


@dataclass(frozen=True)
class Point:
    name: str
    size: float = 1.5

    @property
    def key(self) -> dict[str, Any]:
        return {"size": self.size, "name": self.name}


# Spreads


def test_a_spread_is_least_median_and_most_in_every_notation() -> None:
    spread = Spread.of([0.3, 0.1, 0.2])
    assert spread.as_list() == [0.1, 0.2, 0.3]
    assert spread.as_row("s") == {"s": 0.2, "s_min": 0.1, "s_max": 0.3}
    assert spread.slashed(".0f", 1e3) == "100 / 200 / 300"
    assert spread.slashed(".1f", bold=True) == "0.1 / **0.2** / 0.3"
    assert spread.bracketed(",.0f", 1e4) == "2,000 (1,000 to 3,000)"


def test_three_digits_are_shown_where_nothing_else_is_said() -> None:
    assert [number(value) for value in (0.12345, 12.345, 1234.5)] == ["0.123", "12.3", "1234"]


def test_what_is_not_known_is_left_out_and_nothing_has_no_spread() -> None:
    assert Spread.of_known([None, 2.0, 4.0]) == Spread(2.0, 3.0, 4.0)
    assert Spread.of_known([None]) is None
    with pytest.raises(ValueError, match="empty"):
        Spread.of([])


def test_a_percentile_lies_between_its_neighbours() -> None:
    assert percentile([3.0, 1.0, 2.0], 50) == 2.0
    assert percentile([0.0, 10.0], 95) == pytest.approx(9.5)
    assert percentile([7.0], 95) == 7.0


def test_ratios_are_of_one_round_and_a_missing_round_is_an_error() -> None:
    assert ratios([1.0, 4.0], [2.0, 2.0]) == [0.5, 2.0]
    with pytest.raises(ValueError, match="shorter"):
        ratios([1.0, 4.0], [2.0])


# Turns


def test_every_arm_has_each_place_in_the_order_once() -> None:
    names = ["a", "b", "c"]
    orders = [rotated(names, round_number) for round_number in range(3)]
    assert all(sorted(at) == names for at in zip(*orders, strict=True))


def test_every_round_has_every_arm() -> None:
    assert list(turns(["a", "b"], rounds=3)) == [(0, "a"), (0, "b"), (1, "b"), (1, "a"), (2, "a"), (2, "b")]


# Comparisons


def comparison(values: list[float], bound: Bound) -> Comparison:
    return Comparison("TPOT", "ms", "off", {"off": [10.0, 20.0, 40.0], "on": values}, ("on",), bound)


@pytest.mark.parametrize(
    ("bound", "on", "kept"),
    [
        (Bound(1.03), [10.3, 20.6, 80.0], True),
        (Bound(1.03), [10.0, 20.8, 41.6], False),
        (Bound(0.97, at_most=False), [5.0, 19.4, 39.0], True),
        (Bound(0.97, at_most=False), [9.0, 19.0, 40.0], False),
    ],
)
def test_a_bound_is_judged_by_the_median_ratio_of_the_rounds(bound: Bound, on: list[float], kept: bool) -> None:
    misses = comparison(on, bound).misses()
    assert (misses == []) is kept
    assert all(f"the target is {bound.in_words}." in sentence for sentence in misses)


def test_a_comparison_has_a_line_for_each_arm_and_the_base_is_one() -> None:
    first, second = comparison([5.0, 20.0, 80.0], Bound(1.5)).lines()
    assert first == ["TPOT", "off", "10 / 20 / 40 ms", "1", "", ""]
    assert second == ["TPOT", "on", "5 / 20 / 80 ms", "0.500 / **1.000** / 2.000", "0.500 to 2.000, not shown", "≤ 1.5"]


def test_a_comparison_says_all_of_it_as_json() -> None:
    found = json.loads(json.dumps(comparison([5.0, 20.0, 80.0], Bound(0.9)).as_dict()))
    assert found["ratios"] == {"off": [1.0, 1.0, 1.0], "on": [0.5, 1.0, 2.0]}
    assert found["target"] == {"arms": ["on"], "bound": 0.9, "at_most": True}
    assert found["intervals"] == {"on": {"low": 0.5, "high": 2.0, "pairs": 3, "fewest": 6}}
    assert found["misses"] == ["Missed: TPOT, on: 1.000 of off; the target is at most 0.9."]


# The journal


def test_a_point_is_kept_and_not_measured_again(tmp_path: Path) -> None:
    journal: Journal[Point] = Journal(tmp_path / "new" / "points.jsonl")
    journal.add(Point("a"), rows=[{"x": 1}])
    again: Journal[Point] = Journal(journal.path)
    assert again.of([Point("b"), Point("a")]) == [{"key": Point("a").key, "rows": [{"x": 1}]}]
    assert again.missing([Point("a"), Point("a", 3.0), Point("b")]) == [Point("a", 3.0), Point("b")]


def test_of_two_lines_with_one_key_the_later_one_counts(tmp_path: Path) -> None:
    journal: Journal[Point] = Journal(tmp_path / "points.jsonl")
    for value in (1, 2):
        journal.add(Point("a"), value=value)
    assert [entry["value"] for entry in Journal[Point](journal.path).of([Point("a")])] == [2]


@pytest.mark.parametrize("rest", ['{"key": {"name": "b", "si', "[]", '{"value": 3}'])
def test_a_line_that_was_cut_off_costs_only_itself(tmp_path: Path, rest: str) -> None:
    path = tmp_path / "points.jsonl"
    Journal[Point](path).add(Point("a"), value=1)
    path.write_text(path.read_text() + rest)
    cut: Journal[Point] = Journal(path)
    assert cut.missing([Point("a"), Point("b")]) == [Point("b")]
    cut.add(Point("b"), value=2)
    assert [entry["value"] for entry in Journal[Point](path).of([Point("a"), Point("b")])] == [1, 2]


def test_only_what_is_measured_anew_is_forgotten(tmp_path: Path) -> None:
    journal: Journal[Point] = Journal(tmp_path / "points.jsonl")
    for name in "ab":
        journal.add(Point(name))
    journal.forget([Point("a"), Point("c")])
    assert Journal[Point](journal.path).missing([Point("a"), Point("b")]) == [Point("a")]


# What is handed over


def test_a_table_stands_on_stdout_and_json_where_it_is_wanted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = report.table(["arm", "ms"], [["a", "1"], ["b", "2"]])
    assert table.splitlines() == ["| arm | ms |", "|---|---|", "| a | 1 |", "| b | 2 |"]
    report.deliver(table, {"a": 1}, str(tmp_path / "found.json"))
    assert capsys.readouterr().out == table + "\n"
    assert json.loads((tmp_path / "found.json").read_text()) == {"a": 1}
    report.deliver(table, {"a": 1}, "-")
    assert json.loads(capsys.readouterr().out) == {"a": 1}


def test_a_table_of_objects_has_a_format_for_each_column() -> None:
    found = report.rows({"point": "{0.name}", "size": "{0.size:.2f} x"}, [Point("a"), Point("b", 3)])
    assert found.splitlines()[2:] == ["| a | 1.50 x |", "| b | 3.00 x |"]


def test_a_csv_has_all_columns_of_all_rows(tmp_path: Path) -> None:
    report.write_csv(tmp_path / "rows.csv", [{"a": 1}, {"a": 2, "b": 3}])
    assert (tmp_path / "rows.csv").read_text() == "a,b\n1,\n2,3\n"


def test_what_lies_between_two_marks_is_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<b>\nold\n<e>\nafter\n")
    for text in ("new", "newer"):
        report.write_between(page, "<b>", "<e>", text)
    assert page.read_text() == "before\n<b>\n\nnewer\n<e>\nafter\n"
    page.write_text("no marks")
    with pytest.raises(ValueError, match="no place for the results"):
        report.write_between(page, "<b>", "<e>", "new")


@pytest.mark.parametrize(("words", "text"), [("a", "a"), ("ab", "a and b"), ("abc", "a, b and c")])
def test_words_are_listed(words: str, text: str) -> None:
    assert report.listed(list(words)) == text


def test_prose_is_wrapped_line_by_line_and_no_word_is_broken() -> None:
    long = "word-with-hyphens " * 20
    lines = report.wrapped(f"short\n{long}").splitlines()
    assert lines[0] == "short"
    assert len(lines) > 2
    assert all(len(line) <= report.WIDTH for line in lines)
    assert " ".join(lines[1:]) == long.strip()


def test_lines_and_bars_have_whiskers_and_gaps_where_nothing_was_measured(tmp_path: Path) -> None:
    figure = plots.new_figure()
    left, right = figure.subplots(1, 2)
    rows = [{"model": "m", "n": n, **Spread(n, 2 * n, 3 * n).as_row("s")} for n in (4, 1, 2)]
    plots.lines(left, [*rows, {"model": "n", "n": 1, "s": None}], "n", "s", scale=10, tail=", prefill")
    plots.finish(left, "tokens", "ms", ylog=True)
    (line,) = left.containers
    assert line.get_label() == "m, prefill"
    assert list(line.lines[0].get_ydata()) == [20, 40, 80]
    plots.bars(right, ["0.5 x", "3 x"], {"a": [Spread(1, 2, 4), Spread(1, 1, 1)], "b": [None, Spread(2, 2, 2)]})
    assert sorted(bar.get_height() for bar in right.patches) == [1, 2, 2]
    assert plots.whiskers([Spread(1, 2, 4)]) == [[1], [2]]
    plots.save(figure, tmp_path / "plot.png")
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


# Command lines


def test_words_are_taken_in_their_order_and_what_is_not_known_is_one_sentence() -> None:
    assert program.chosen("arm", [" b", "a", "b", ""], ["a", "b", "c"]) == ("b", "a")
    with pytest.raises(program.InputError, match=r"^There is no arm 'd'; choose from a, b\.$"):
        program.chosen("arm", ["d"], ["a", "b"])
    with pytest.raises(program.InputError, match=r"^No arm is named; choose from a, b\.$"):
        program.chosen("arm", [" "], ["a", "b"])


def test_an_unwritable_folder_is_one_sentence(tmp_path: Path) -> None:
    assert program.writable(tmp_path / "new" / "results", "--results").is_dir()
    (tmp_path / "file").write_text("")
    with pytest.raises(program.InputError, match=r"cannot be written to \(.*\); name another folder with --results"):
        program.writable(tmp_path / "file" / "results", "--results")


def test_what_cannot_be_ends_the_program_with_its_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for error in (program.InputError("No [arm]."), KeyError("k")):
        with pytest.raises(typer.Exit) as ended, program.one_sentence(KeyError):
            raise error
        assert ended.value.exit_code == program.EXIT_INPUT
    assert capsys.readouterr().err.splitlines() == ["No [arm].", "'k'"]


def test_a_signal_to_end_is_as_ctrl_c() -> None:
    before = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)]
    try:
        program.stop_by_signal()
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGTERM)
    finally:
        for signum, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(signum, handler)


# Processes


@pytest.mark.parametrize(("used", "looks", "rests"), [([2.0, 1.9, 0.1, 2.0], 3, True), ([2.0] * 100, 30, False)])
def test_a_server_is_waited_for_until_it_rests_but_not_for_ever(
    used: list[float], looks: int, rests: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CPU seconds in each look of two seconds, by a clock that only waiting moves."""
    slept: list[float] = []
    monkeypatch.setattr(processes.time, "sleep", slept.append)
    monkeypatch.setattr(processes.time, "monotonic", lambda: sum(slept))
    monkeypatch.setattr(processes.CPUMeter, "seconds", lambda self: used[len(slept) - 1])
    assert processes.wait_until_quiet(psutil.Process()) is rests
    assert len(slept) == looks


def test_a_process_tree_has_time_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    this = psutil.Process()
    meter = processes.CPUMeter(this)
    while meter.seconds() == 0:
        sum(range(100_000))
    uses = processes.use_by_process(this)
    assert uses[-1].pss_bytes > 0
    monkeypatch.setattr(processes, "use_by_process", lambda top: uses)  # a second reading would find other sizes
    assert processes.pss_bytes(this) == sum(use.pss_bytes for use in uses)
    assert max(use.cpu_s for use in uses) > 0
    assert processes.busy_s() > 0


def test_the_machine_is_named_with_its_versions(each_processor: str) -> None:
    assert f"torch {processes.version('torch')}" in processes.machine_line()
    assert processes.version("no-such-package") is None


def ended(*words: Any, **options: Any) -> int:
    """The exit code of a program that ends so."""
    try:
        program.conclude(*words, **options)
    except typer.Exit as ending:
        return ending.exit_code
    return 0


def test_a_program_ends_with_its_table_json_and_page_and_a_code_for_what_was_missed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page, made = tmp_path / "page.md", tmp_path / "made.json"
    page.write_text("before\n<b>\nold\n<e>\nafter\n")
    block = program.Block(page, "<b>", "<e>")
    assert ended("table", {"a": 1}, str(made)) == 0
    assert page.read_text() == "before\n<b>\nold\n<e>\nafter\n"
    assert ended("table\n\nMissed: one.", {"a": 1}, str(made), ["Missed: one.", "Missed: two."], block) == 1
    assert json.loads(made.read_text()) == {"a": 1}
    assert page.read_text() == "before\n<b>\n\ntable\n\nMissed: one.\n<e>\nafter\n"
    assert ended("table", {}, None, (), block, "for the page") == 0
    assert "for the page" in page.read_text()
    said = capsys.readouterr()
    assert said.out.count("table") == 3
    assert said.err == "Missed: two.\n"


def test_a_page_without_a_place_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.md"
    page.write_text("nothing")
    assert ended("table", {}, None, (), program.Block(page, "<b>", "<e>")) == program.EXIT_INPUT
    said = capsys.readouterr()
    assert "no place for the results" in said.err
    assert "table" in said.out, "what was measured is shown all the same"
