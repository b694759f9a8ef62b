"""The motivating study: `python -m load_tests.experiments`, or `make experiments`.

Measures what is not measured yet, one engine at a time, and writes docs/measured/experiments.md with plots and CSVs.
Ctrl-C at any time: the same command goes on. `--quick` tries everything with small sizes, and leaves docs alone.
"""

from __future__ import annotations

import json
import shlex
import signal
import sys
import tempfile
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from configs.model_folder import PROJECT_ROOT
from load_tests.experiments.catalogue import EXPERIMENTS
from load_tests.experiments.engine_specs import EngineSpec
from load_tests.experiments.experiment import Point
from load_tests.experiments.journal import Journal
from load_tests.experiments.report import Result, as_json, write_report
from load_tests.experiments.runner import run_points
from load_tests.experiments.sizes import DTYPE_BYTES, Sizes, fast_dtype, longest_prompt
from load_tests.harness.engine_process import EngineProcess
from load_tests.harness.models import SHAPES, ModelError, model_folder

STATE = PROJECT_ROOT / ".crosskv" / "experiments"
EXIT_INPUT = 2
EXIT_STOPPED = 130
out = Console(stderr=True, highlight=False, soft_wrap=True)


def refuse(sentence: str) -> NoReturn:
    """End with one sentence."""
    out.print(sentence, markup=False)
    raise typer.Exit(EXIT_INPUT)


def chosen(wanted: list[str] | None, known: list[str], what: str) -> list[str]:
    """The wanted ones in the order of the known ones; all when none is named. Refuses an unknown one."""
    for name in wanted or []:
        if name not in known:
            refuse(f"There is no {what} {name!r}; choose from {', '.join(known)}.")
    return [name for name in known if not wanted or name in wanted]


def require_writable(folder: Path, option: str) -> None:
    """Make the folder and try to write there. Refuses one where that is not possible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        refuse(f"Nothing can be written to {folder} ({error.strerror}); name another folder with {option}.")


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
    json_file: Annotated[str | None, typer.Option("--json", help="A file, or - for stdout.")] = None,
) -> None:
    """Measure, write the report, and print each experiment's sentence."""
    names = chosen(only, list(EXPERIMENTS), "experiment")
    models = chosen(model, sorted(SHAPES, key=lambda name: SHAPES[name].parameters), "model")
    lengths = {name: longest or longest_prompt(SHAPES[name].parameters, quick) for name in models}
    if dtype is not None:
        chosen([dtype], list(DTYPE_BYTES), "dtype")
    sizes = Sizes(tuple(models), lengths, dtype or fast_dtype(), repeats or (2 if quick else 3), quick)
    target = docs or (state / "quick" if quick else PROJECT_ROOT / "docs" / "measured")
    require_writable(state, "--state")
    require_writable(target, "--docs")
    if json_file not in (None, "-"):
        require_writable(Path(json_file).resolve().parent, "--json")
    journal = Journal(state / "points.jsonl")
    planned = {name: experiment.points(sizes) for name, experiment in EXPERIMENTS.items()}
    wanted = [point for name in names for point in planned[name]]
    if fresh:
        journal.forget(wanted)
    command = shlex.join(["python", "-m", "load_tests.experiments", *sys.argv[1:]])
    failures: list[str] = []
    try:
        failures = measure(wanted, journal, state / "engine.log")
    except KeyboardInterrupt:
        kept = sum(map(journal.has, wanted))
        out.print(
            f"Stopped: {kept} of {len(wanted)} points are kept in {journal.path}; the same command goes on.",
            markup=False,
        )
        raise typer.Exit(EXIT_STOPPED) from None
    except ModelError as error:
        refuse(str(error))
    results = [Result(EXPERIMENTS[name], len(points), journal.of(points)) for name, points in planned.items()]
    try:
        write_report(target / "experiments.md", results, sizes, command)
        text = json.dumps(as_json(results, sizes, command), indent=2)
        if json_file and json_file != "-":
            Path(json_file).write_text(text)
    except OSError as error:
        refuse(
            f"The report was not written: {error.filename}: {error.strerror}; "
            f"what was measured is kept in {journal.path}."
        )
    if json_file == "-":
        print(text)
    for result in results:
        if result.experiment.name in names:
            out.print(f"{result.experiment.name}: {result.conclusion}", markup=False)
    out.print(f"Report: {target / 'experiments.md'}", markup=False)
    if failures:
        out.print(
            f"{len(failures)} points were not measured; the same command tries them again. The first: {failures[0]}",
            markup=False,
        )
        raise typer.Exit(1)


def measure(wanted: list[Point], journal: Journal, log: Path) -> list[str]:
    """All points that are not in the journal, with a progress bar. Returns the failures."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=out, transient=True) as progress:
        bar = progress.add_task("", total=len(wanted), completed=sum(map(journal.has, wanted)))

        def on_point(point: Point, done: bool) -> None:
            progress.update(bar, advance=int(done), description=f"{point.experiment}, {point.model}")

        def open_engine(spec: EngineSpec) -> EngineProcess:
            progress.update(bar, description=f"starting an engine of {spec.model}")
            return EngineProcess(spec, str(model_folder(spec.model)), log)

        return run_points(wanted, EXPERIMENTS, journal, open_engine, on_point)


if __name__ == "__main__":
    # SIGTERM as Ctrl-C, which a shell's background jobs ignore unless told: the engine is ended, what is there is kept.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    typer.run(main)
