"""The motivating study: `python -m load_tests.experiments`, or `make experiments`.

Measures what is not measured yet, one engine at a time, and writes a report with plots and CSVs
next to the page that sums it up, docs/measured/experiments.md.
Ctrl-C at any time: the same command goes on. `--quick` tries everything with small sizes, and leaves docs alone.
"""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from configs.model_folder import PROJECT_ROOT
from load_tests.experiments.batches import BatchLimits, MicroBatch, TokensPerPass
from load_tests.experiments.experiment import Experiment, Point
from load_tests.experiments.memory import KVBytes, ReuseMemory
from load_tests.experiments.moving import ReuseLatency
from load_tests.experiments.prefill import OutputShare, PrefillLength, PrefillShare
from load_tests.experiments.report import Result, as_json, write_report
from load_tests.experiments.runner import run_points
from load_tests.experiments.sizes import DTYPE_BYTES, EngineSpec, Sizes, fast_dtype, longest_prompt
from load_tests.experiments.swap import Swap
from load_tests.harness.engine_process import EngineProcess
from load_tests.harness.models import SHAPES, ModelError, model_folder
from load_tests.measuring import program as common
from load_tests.measuring.journal import Journal
from load_tests.measuring.program import InputError, JsonFile, one_sentence, out, writable
from load_tests.measuring.report import write_json

STATE = PROJECT_ROOT / ".crosskv" / "experiments"
REPORT = "experiments_report.md"
EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        PrefillShare(), PrefillLength(), OutputShare(), KVBytes(), BatchLimits(), MicroBatch(), ReuseLatency(),
        ReuseMemory(), Swap(), TokensPerPass(),
    )
}  # fmt: skip
"""In the order of the study."""


def main(
    only: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(EXPERIMENTS)}; may be repeated.")] = None,
    model: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(SHAPES)}; may be repeated.")] = None,
    quick: Annotated[bool, typer.Option(help="Small sizes: does everything work?")] = False,
    fresh: Annotated[bool, typer.Option(help="Measure again what is measured already.")] = False,
    repeats: Annotated[int | None, typer.Option(min=1, help="Of each measurement. Default 3, quick 2.")] = None,
    longest: Annotated[
        int | None,
        typer.Option(min=512, max=16384, help="Longest prompt of every model, in tokens. Default: by its size."),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bfloat16 or float32. Default: bfloat16 where this processor is fast at it.")
    ] = None,
    docs: Annotated[
        Path | None,
        typer.Option(help="Folder of the report. Default: docs/measured; quick: .crosskv/experiments/quick."),
    ] = None,
    state: Annotated[Path, typer.Option(help="Folder of the journal and the engines' log.")] = STATE,
    json_file: JsonFile = None,
) -> None:
    """Measure, write the report, and print each experiment's sentence."""
    with one_sentence():
        names = _in_order("experiment", only, list(EXPERIMENTS))
        models = _in_order("model", model, sorted(SHAPES, key=lambda name: SHAPES[name].parameters))
        _in_order("dtype", [dtype] if dtype else None, list(DTYPE_BYTES))
        target = writable(docs or (state / "quick" if quick else PROJECT_ROOT / "docs" / "measured"), "--docs")
        writable(state, "--state")
        if json_file not in (None, "-"):
            writable(Path(json_file).resolve().parent, "--json")
    lengths = {name: longest or longest_prompt(SHAPES[name].parameters, quick) for name in models}
    sizes = Sizes(tuple(models), lengths, dtype or fast_dtype(), repeats or (2 if quick else 3), quick)
    journal: Journal[Point] = Journal(state / "points.jsonl")
    planned = {name: experiment.points(sizes) for name, experiment in EXPERIMENTS.items()}
    wanted = [point for name in names for point in planned[name]]
    if fresh:
        journal.forget(wanted)
    command = shlex.join(["python", "-m", "load_tests.experiments", *sys.argv[1:]])
    try:
        with one_sentence(ModelError):
            failures = measure(wanted, journal, state / "engine.log")
    except KeyboardInterrupt:
        kept = f"{len(journal.of(wanted))} of {len(wanted)} points are kept in {journal.path}"
        out.print(f"Stopped: {kept}; the same command goes on.", markup=False)
        raise typer.Exit(common.EXIT_STOPPED) from None
    results = [Result(EXPERIMENTS[name], len(points), journal.of(points)) for name, points in planned.items()]
    with one_sentence():
        try:
            write_report(target / REPORT, results, sizes, command)
            write_json(as_json(results, sizes, command), json_file)
        except OSError as error:
            raise InputError(
                f"The report was not written: {error.filename}: {error.strerror}; "
                f"what was measured is kept in {journal.path}."
            ) from None
    for result in results:
        if result.experiment.name in names:
            out.print(f"{result.experiment.name}: {result.conclusion}", markup=False)
    out.print(f"Report: {target / 'experiments.md'}", markup=False)
    if failures:
        out.print(
            f"{len(failures)} points were not measured; the same command tries them again. The first: {failures[0]}",
            markup=False,
        )
        raise typer.Exit(common.EXIT_FELL_SHORT)


def _in_order(kind: str, wanted: list[str] | None, known: list[str]) -> list[str]:
    """The wanted ones in the order of the known ones; all when none is named. Raises InputError."""
    return sorted(common.chosen(kind, wanted or known, known), key=known.index)


def measure(wanted: list[Point], journal: Journal[Point], log: Path) -> list[str]:
    """All points that are not in the journal, with a progress bar. Returns the failures."""
    with common.progress_bar() as progress:
        bar = progress.add_task("", total=len(wanted), completed=len(journal.of(wanted)))

        def on_point(point: Point, done: bool) -> None:
            progress.update(bar, advance=int(done), description=f"{point.experiment}, {point.model}")

        def open_engine(spec: EngineSpec) -> EngineProcess:
            progress.update(bar, description=f"starting an engine of {spec.model}")
            return EngineProcess(spec, str(model_folder(spec.model)), log)

        return run_points(wanted, EXPERIMENTS, journal, open_engine, on_point)


if __name__ == "__main__":
    common.stop_by_signal()  # the engine is ended, and what is there is kept
    typer.run(main)
