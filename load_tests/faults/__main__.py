"""`python -m load_tests.faults`: a server of its own, every fault in turn, and a table of what the requests saw.

Exit codes: 0 everything was as it must be, 1 something was wrong.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from load_tests.faults.catalogue import FAULTS, started_world
from load_tests.faults.trial import Outcome, Trials

out = Console(stderr=True, highlight=False)
SETTINGS = {"dtype": "float32", "http": {"debug_headers": True}}


def main(
    only: Annotated[list[str] | None, typer.Option(help="Faults with this in their name; repeatable.")] = None,
    seed: int = 0,
    json_file: Annotated[str | None, typer.Option("--json", help="A file, or - for stdout.")] = None,
) -> None:
    """Disturb a server that is started for it; takes some minutes."""
    chosen = [f for f in FAULTS if any(part in f"{f.part}: {f.name}" for part in only or [""])]
    if not chosen:
        out.print(f"no fault contains {only!r}; there are: " + ", ".join(f"{f.part}: {f.name}" for f in FAULTS))
        raise typer.Exit(2)
    outcomes: list[Outcome] = []
    with contextlib.ExitStack() as stack, Progress(console=out) as progress:
        bar = progress.add_task("starting a server", total=len(chosen))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        trials = Trials(stack.enter_context(started_world(folder, SETTINGS)), "demo", seed)
        for fault in chosen:
            progress.update(bar, description=f"{fault.part}: {fault.name}")
            outcomes.append(trials.run(fault, timed=True))
            for problem in outcomes[-1].problems:
                progress.print(f"[red]{fault.part} {fault.name}:[/] {escape(problem)}")
            progress.advance(bar)
    out.print(_table(outcomes))
    if json_file:
        report = json.dumps([outcome.as_dict() for outcome in outcomes], indent=2)
        print(report) if json_file == "-" else Path(json_file).write_text(report)
    raise typer.Exit(int(any(outcome.problems for outcome in outcomes)))


def _table(outcomes: list[Outcome]) -> Table:
    times = ("worst request", "extra", "extra to first token")
    table = Table("part", "fault", "requests", "broken", *times, "/health said", "back after")
    for o in outcomes:
        table.add_row(
            o.part,
            o.fault,
            str(o.requests),
            str(o.broken_streams),
            f"{o.worst_s:.2f} s",
            f"{o.extra_s:+.2f} s",
            f"{o.extra_first_token_s:+.2f} s",
            "; ".join(f"{part}: {state}" for part, state in o.health_said.items()),
            f"{o.back_after_s:.1f} s",
        )
    return table


if __name__ == "__main__":
    typer.run(main)
