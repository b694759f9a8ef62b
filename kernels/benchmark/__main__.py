"""The command: measure every kernel, print the table, say which targets were missed."""

import dataclasses
import json
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any

import numba  # type: ignore[import-untyped]
import torch
import typer
from llvmlite import binding  # type: ignore[import-untyped]
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from kernels.benchmark.codec_cases import FAMILIES as CODEC_FAMILIES
from kernels.benchmark.codec_cases import codec_cases
from kernels.benchmark.measuring import Case, Clock, Row, Target, measure, thread_seconds
from kernels.benchmark.paged_cases import FAMILIES as PAGED_FAMILIES
from kernels.benchmark.paged_cases import device_cases, device_seconds, paged_cases


def table(rows: Sequence[Row]) -> Table:
    """Medians, with the lowest and the highest in brackets. The copy is memcpy, on a GPU the device's own."""
    drawn = Table("kernel", title="median (lowest-highest)")
    for column in ("rate", "copy, GB/s", "of the copy", "µs a call", "must reach"):
        drawn.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        drawn.add_row(
            row.name,
            f"{_spread(row.rates)} {row.unit}",
            _spread(row.copy_gb_per_s),
            _spread(row.ratios),
            f"{row.microseconds_per_call:.1f}",
            f"{_must_reach(row)}{': missed' if row.missed else ''}",
        )
    return drawn


def as_dict(rows: Sequence[Row]) -> dict[str, Any]:
    """Everything measured, and on what."""
    return {
        "torch": torch.__version__,
        "numba": numba.__version__,
        "cpu": binding.get_host_cpu_name(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "rows": [{**dataclasses.asdict(row), "missed": row.missed} for row in rows],
        "missed": [row.missed for row in rows if row.missed],
    }


def _must_reach(row: Row) -> str:
    match row.target:
        case Target("rate", least):
            return f"{least:g} {row.unit}"
        case Target("ratio", least):
            return f"{least:g} of memcpy"
        case _:
            return "-"


def _spread(values: Sequence[float]) -> str:
    digits = 0 if max(values) >= 100 else 2
    low, middle, high = (f"{value:.{digits}f}" for value in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low}-{high})"


FAMILIES = PAGED_FAMILIES + CODEC_FAMILIES


def main(
    json_file: Annotated[
        str | None, typer.Option("--json", help="A file, or - for stdout instead of the table.")
    ] = None,
    repetitions: Annotated[int, typer.Option(min=1, help="Pairs of a copy and a kernel in each row.")] = 9,
    only: Annotated[str, typer.Option(help="Kernels, separated by commas.")] = ",".join(FAMILIES),
) -> None:
    """Measure on one thread, about a minute; targets that were missed are named, and are no failure."""
    families = _families(only)
    torch.set_num_threads(1)
    err = Console(stderr=True, highlight=False)
    rows = _measure_all(paged_cases(families), repetitions, thread_seconds, err) if families & {*PAGED_FAMILIES} else []
    if families & {*CODEC_FAMILIES}:
        rows += _measure_all(codec_cases(families), repetitions, thread_seconds, err)
    if torch.cuda.is_available() and families & {*PAGED_FAMILIES}:
        rows += _measure_all(device_cases(families), repetitions, device_seconds, err)
    if json_file != "-":
        # A pipe has no width of its own, and cells must not be cut there.
        Console(highlight=False, width=None if sys.stdout.isatty() else 160).print(table(rows))
    for row in rows:
        if row.missed:
            err.print(f"falls short: {row.missed}", soft_wrap=True)
    if not any(row.missed for row in rows):
        err.print("every target was reached")
    if json_file:
        text = json.dumps(as_dict(rows), indent=2)
        print(text) if json_file == "-" else Path(json_file).write_text(text + "\n", encoding="utf-8")


def _measure_all(cases: Iterable[Case], repetitions: int, clock: Clock, console: Console) -> list[Row]:
    columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
    rows = []
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("preparing", total=None)
        for case in cases:
            progress.update(task, description=case.name)
            rows.append(measure(case, repetitions, clock))
    return rows


def _families(text: str) -> set[str]:
    families = {part.strip() for part in text.split(",")}
    if not families <= {*FAMILIES}:
        raise typer.BadParameter(f"only {', '.join(FAMILIES)} are measured, got {text!r}")
    return families


if __name__ == "__main__":
    typer.run(main)
