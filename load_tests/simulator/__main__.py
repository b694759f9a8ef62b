"""`python -m load_tests.simulator`: replays a trace through the manager that serves; docs/tools/simulator.md.

With `roles` as its first word it simulates engines step by step instead (`load_tests.simulator.steps`).

Exit codes: 0 done, 1 a replay broke off or a result could not be written, 2 something in the command or in a file that
it names cannot work (one sentence on stderr says what; nothing was written).
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from load_tests.simulator.options import Job, OptionError, check_output, make_job
from load_tests.simulator.plot import plot, plot_formats
from load_tests.simulator.report import as_data, print_table
from load_tests.simulator.runs import Result, RunError, run
from load_tests.simulator.steps.command import roles

EXIT_FAILED, EXIT_INPUT = 1, 2
COMMANDS = {"roles": roles}
"""By the first word; without one of these a trace is replayed."""
WIDTH_ELSEWHERE = 200
"""Columns where the output is no terminal, which could tell its own."""


def simulate(
    trace: Annotated[str, typer.Option(help="A trace in Mooncake's format, JSON lines.")],
    capacity: Annotated[str, typer.Option(help="Blocks of the CPU tier; several: 1000,10000.")],
    policy: Annotated[
        str, typer.Option(help="Eviction policies: names, all, or module:Class, separated by commas.")
    ] = "lfu",
    replicas: Annotated[str, typer.Option(help="Replicas behind a router.")] = "1",
    router: Annotated[str | None, typer.Option(help="Routers: names, or all, separated by commas.")] = None,
    device_blocks: Annotated[str, typer.Option(help="Blocks of each replica's device pool; 0: no such tier.")] = "0",
    redis_blocks: Annotated[str, typer.Option(help="Blocks of Redis; 0: no such tier.")] = "0",
    rate_scale: Annotated[
        str | None,
        typer.Option(help="With a router: how much faster requests arrive than recorded."),
    ] = None,
    requests: Annotated[str | None, typer.Option(help="Replay at most this many requests.")] = None,
    seed: Annotated[str, typer.Option(help="For policies and routers that draw by chance.")] = "0",
    costs: Annotated[str | None, typer.Option(help="A JSON file with rates that replace the defaults.")] = None,
    jobs: Annotated[str | None, typer.Option(help="Replays at once; as many as there are cores by default.")] = None,
    plot_file: Annotated[
        str | None, typer.Option("--plot", help="Draw hit rate over capacity into this file (.png, .svg, .pdf).")
    ] = None,
    json_file: Annotated[
        str | None, typer.Option("--json", help="Write the results as JSON to this file, or to stdout with -.")
    ] = None,
) -> None:
    """Replay a trace through the KV manager and say what it would have reused, moved and recomputed.

    Blocks are the trace's: 512 tokens each.
    """
    err = Console(stderr=True, highlight=False, soft_wrap=True)
    try:
        _check_outputs(plot_file, json_file, trace, *([costs] if costs else []))
        job = make_job(
            trace=trace,
            capacity=capacity,
            policy=policy,
            replicas=replicas,
            router=router,
            device_blocks=device_blocks,
            redis_blocks=redis_blocks,
            rate_scale=rate_scale,
            requests=requests,
            seed=seed,
            costs=costs,
            jobs=jobs,
        )
    except OptionError as error:
        err.print(str(error), markup=False)
        raise typer.Exit(EXIT_INPUT) from None
    try:
        rows = [as_data(result, trace, job.costs) for result in _run(job, err)]
        _show(rows, json_file)
        _write(rows, plot_file, json_file)
    except RunError as error:
        err.print(str(error), markup=False)
        raise typer.Exit(EXIT_FAILED) from None
    except OSError as error:
        err.print(f"{error.filename} cannot be written ({error.strerror}).", markup=False)
        raise typer.Exit(EXIT_FAILED) from None


def _check_outputs(plot_file: str | None, json_file: str | None, *inputs: str) -> None:
    if json_file is not None and json_file != "-":
        check_output("--json", json_file, *inputs)
    if plot_file is not None:
        check_output("--plot", plot_file, *inputs)
        ending = Path(plot_file).suffix.removeprefix(".").lower()
        if ending not in plot_formats():
            raise OptionError(f"--plot: {plot_file} must end in .png, .svg or .pdf.")


def _run(job: Job, err: Console) -> Sequence[Result]:
    columns = (TextColumn("requests"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        task = bar.add_task("", total=len(job.trace) * len(job.setups))
        return run(job.trace, job.setups, job.costs, job.processes, lambda done: bar.update(task, completed=done))


def _show(rows: Sequence[dict[str, Any]], json_file: str | None) -> None:
    out = Console(stderr=json_file == "-", highlight=False)
    if not out.is_terminal:
        out.width = WIDTH_ELSEWHERE
    print_table(out, rows)


def _write(rows: Sequence[dict[str, Any]], plot_file: str | None, json_file: str | None) -> None:
    if plot_file is not None:
        plot(rows, Path(plot_file))
    if json_file is not None:
        text = json.dumps(rows, indent=2) + "\n"
        if json_file == "-":
            sys.stdout.write(text)
        else:
            Path(json_file).write_text(text, encoding="utf-8")


def main(words: Sequence[str]) -> None:
    """Run what a command line's words say."""
    command = COMMANDS.get(words[0]) if words else None
    app = typer.Typer(add_completion=False)
    app.command()(command or simulate)
    app(args=list(words[1:] if command else words), prog_name="python -m load_tests.simulator")


if __name__ == "__main__":
    main(sys.argv[1:])
