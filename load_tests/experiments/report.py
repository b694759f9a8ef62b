"""The report: for each experiment a CSV, a plot, and in one Markdown file question, conclusion and table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from load_tests.experiments.columns import Row
from load_tests.experiments.experiment import Experiment
from load_tests.experiments.sizes import STEP_TOKENS, Sizes
from load_tests.measuring import plots
from load_tests.measuring.processes import machine_line
from load_tests.measuring.report import table, wrapped, write_csv

FOLDER = "experiments"
"""Next to the report, for plots and CSVs."""
QUICK = " — **quick: small sizes, a trial of the program**"
BUSY_CORES = 0.3
BUSY = ": **a busy machine, so times are longer than they are alone; take ratios, with care**"


@dataclass(frozen=True)
class Result:
    """What is there of an experiment; `planned`: how many points it has."""

    experiment: Experiment
    planned: int
    entries: Sequence[Mapping[str, Any]]
    """Of the journal: `rows`; `others_cores`, what other programs used meanwhile, None for a point that was computed;
    `ended`, date and time, ISO."""

    @property
    def rows(self) -> list[Row]:
        """Of all points, in their order."""
        return [row for entry in self.entries for row in entry["rows"]]

    @property
    def conclusion(self) -> str:
        """What the rows say; where points are missing it says so."""
        if not self.entries:
            return "Not measured yet."
        missing = self.planned - len(self.entries)
        return self.experiment.conclusion(self.rows) + (
            f"\n\n({missing} of {self.planned} points are missing.)" if missing else ""
        )


def write_report(path: Path, results: Sequence[Result], sizes: Sizes, command: str) -> None:
    """Write `path` and the plots and CSVs in `FOLDER` next to it. Raises OSError."""
    folder = path.parent / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    for result in results:
        if result.entries:
            write_csv(folder / f"{result.experiment.name}.csv", result.rows)
            draw(folder / f"{result.experiment.name}.png", result)
    path.write_text(markdown(results, sizes, command), encoding="utf-8")


def draw(path: Path, result: Result) -> None:
    """The experiment's plot as a PNG."""
    figure = plots.new_figure()
    result.experiment.plot(result.rows, figure)
    plots.save(figure, path)


def markdown(results: Sequence[Result], sizes: Sizes, command: str) -> str:
    """The report's text."""
    parts = ["# Experiments", _header(results, sizes, command)]
    for number, result in enumerate(results, 1):
        experiment = result.experiment
        parts += [f"## {number}. {experiment.title}", f"**{experiment.question}**", wrapped(result.conclusion)]
        if not result.entries:
            parts.append(f"`python -m load_tests.experiments --only {experiment.name}`")
            continue
        shown, columns = experiment.shown(result.rows), experiment.columns
        cells = ([column.cell(row) for column in columns] for row in shown)
        parts.append(f"![{experiment.title}]({FOLDER}/{experiment.name}.png)")
        parts.append(table([column.title for column in columns], cells))
        rows = f"{len(shown)} of {len(result.rows)} rows; all: [{experiment.name}.csv]({FOLDER}/{experiment.name}.csv)."
        parts.append(wrapped(f"{experiment.note} {rows}" if experiment.note else rows))
    return "\n\n".join(parts) + "\n"


def _header(results: Sequence[Result], sizes: Sizes, command: str) -> str:
    entries = [entry for result in results for entry in result.entries]
    lengths = ", ".join(f"{model} up to {sizes.longest[model]:,} tokens" for model in sizes.models)
    lines = [
        "What prefill costs, what KV weighs, and when moving it beats computing it.\nThe program writes this page. "
        "Each conclusion names the [setting](../guide/settings.md) that it is about.\n",
        f"- Command: `{command}`{QUICK if sizes.quick else ''}",
        f"- Machine: {machine_line()}",
        f"- Sizes: {lengths}. Steps of {STEP_TOKENS:,} tokens where nothing else is said",
        f"- Models: random weights of real shapes (`load_tests/harness/models.py`), {sizes.dtype}, eager, "
        "one thread each",
        f"- Cells: medians of {sizes.repeats} repeats, the least and the most in brackets",
        f"- Points: {len(entries)} of {sum(result.planned for result in results)} measured",
    ]
    if entries:
        lines[-1] += f", {min(entry['ended'] for entry in entries)} to {max(entry['ended'] for entry in entries)}"
    busy = [cores for entry in entries if (cores := entry["others_cores"]) is not None]
    if busy:
        others = statistics.median(busy)
        lines.append(
            f"- Other programs used {others:.1f} of {psutil.cpu_count()} cores (median of the points; "
            f"{max(busy):.1f} at most){BUSY if others >= BUSY_CORES else ''}"
        )
    return "\n".join(lines)


def as_json(results: Sequence[Result], sizes: Sizes, command: str) -> dict[str, Any]:
    """For `--json`."""
    found = {
        result.experiment.name: {
            "question": result.experiment.question,
            "setting": result.experiment.setting,
            "points": {"planned": result.planned, "measured": len(result.entries)},
            "rows": result.rows,
            "conclusion": result.conclusion,
        }
        for result in results
    }
    return {
        "command": command,
        "machine": machine_line(),
        "quick": sizes.quick,
        "repeats": sizes.repeats,
        "experiments": found,
    }
