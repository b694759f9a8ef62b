"""`python -m load_tests.faults`: a server of its own, every fault in turn, and a table of what the requests saw.

Exit codes: 0 everything was as it must be, 1 something was wrong.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape

from load_tests.faults.catalogue import BLEND_FAULTS, FAULTS, PAIRED_FAULTS, SURROUNDING_FAULTS, started_world
from load_tests.faults.trial import Outcome, Trials
from load_tests.measuring import report
from load_tests.measuring.program import EXIT_INPUT, JsonFile, out, progress_bar

COLUMNS = {
    "part": "{0.part}",
    "fault": "{0.fault}",
    "requests": "{0.requests}",
    "broken": "{0.broken_streams}",
    "worst request": "{0.worst_s:.2f} s",
    "extra": "{0.extra_s:+.2f} s",
    "extra to first token": "{0.extra_first_token_s:+.2f} s",
    "/health said": "{0.health_in_words}",
    "back after": "{0.back_after_s:.1f} s",
}
SETTINGS = {"dtype": "float32"}


def main(
    only: Annotated[list[str] | None, typer.Option(help="Faults with this in their name; repeatable.")] = None,
    times: Annotated[int, typer.Option(min=1, help="How often each; a row for each time.")] = 1,
    seed: int = 0,
    json_file: JsonFile = None,
) -> None:
    """Disturb a server that is started for it; takes some minutes."""
    known = (*FAULTS, *SURROUNDING_FAULTS, *PAIRED_FAULTS, *BLEND_FAULTS)
    chosen = [f for f in known if any(part in f"{f.part}: {f.name}" for part in only or [""])]
    if not chosen:
        out.print(f"no fault contains {only!r}; there are: " + ", ".join(f"{f.part}: {f.name}" for f in known))
        raise typer.Exit(EXIT_INPUT)
    chosen *= times
    outcomes: list[Outcome] = []
    with contextlib.ExitStack() as stack, progress_bar() as progress:
        bar = progress.add_task("starting a server", total=len(chosen))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        world = stack.enter_context(started_world(folder, SETTINGS))
        trials: dict[bool, Trials] = {}
        for fault in chosen:
            progress.update(bar, description=f"{fault.part}: {fault.name}")
            blended = fault in BLEND_FAULTS
            if blended not in trials:
                trials[blended] = Trials(world, "demo", seed, blended=blended)
            outcomes.append(trials[blended].run(fault, timed=True))
            for problem in outcomes[-1].problems:
                progress.print(f"[red]{fault.part} {fault.name}:[/] {escape(problem)}")
            progress.advance(bar)
    report.deliver(report.rows(COLUMNS, outcomes), [outcome.as_dict() for outcome in outcomes], json_file)
    raise typer.Exit(int(any(outcome.problems for outcome in outcomes)))


if __name__ == "__main__":
    typer.run(main)
