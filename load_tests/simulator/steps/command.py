"""`python -m load_tests.simulator roles`: replicas that prefill or decode, compared with replicas that do both.

Exit codes: 0 done, 1 a result could not be written, 2 a word of the command cannot be used.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from load_tests.simulator.steps.jobs import Load
from load_tests.simulator.steps.machines import MACHINES
from load_tests.simulator.steps.report import table, write_between
from load_tests.simulator.steps.roles import Row, arms, run_arm

EXIT_FAILED = 1
PAGE = Path(__file__).parents[3] / "docs" / "measured" / "scheduling.md"


def roles(
    machine: Annotated[str | None, typer.Option(help=f"One of {', '.join(MACHINES)}; all by default.")] = None,
    replicas: Annotated[int | None, typer.Option(min=2, max=1_000, help="Instead of the machine's own.")] = None,
    rate: Annotated[float | None, typer.Option(min=0.001, help="Requests a second, instead of its own.")] = None,
    jobs: Annotated[int | None, typer.Option(min=1, max=1_000_000, help="Requests, instead of its own.")] = None,
    split_above: Annotated[int, typer.Option(min=0, help="Shorter prompts stay whole on a decode replica.")] = 0,
    seed: Annotated[int, typer.Option(help="Of arrivals and lengths; every arm gets the same.")] = 1,
    json_file: Annotated[str | None, typer.Option("--json", help="A file, or - for stdout.")] = None,
    write_docs: Annotated[bool, typer.Option("--write-docs", help="Put the tables into the documentation.")] = False,
) -> None:
    """Simulate engines step by step, and print what roles do to TTFT, TPOT and completion."""
    if machine is not None and machine not in MACHINES:
        raise typer.BadParameter(f"--machine: {machine!r} is none of {', '.join(MACHINES)}")
    texts: list[str] = []
    rows: list[Row] = []
    for name in [machine] if machine else MACHINES:
        own = MACHINES[name]
        chosen = replace(own, replicas=replicas or own.replicas, rate=rate or own.rate, jobs=jobs or own.jobs)
        load = Load(chosen.rate, chosen.prompt, chosen.answer, chosen.jobs)
        done = [run_arm(chosen, arm, load, seed) for arm in arms(chosen, split_above)]
        texts.append(table(chosen, done, seed))
        rows += done
    text = "\n\n".join(texts)
    try:
        if json_file != "-":
            print(text)
        as_json = json.dumps([row.as_data() for row in rows], indent=2) + "\n"
        if json_file == "-":
            sys.stdout.write(as_json)
        elif json_file:
            Path(json_file).write_text(as_json, encoding="utf-8")
        if write_docs:
            write_between(PAGE, text)
    except (OSError, ValueError) as error:
        Console(stderr=True).print(str(error), markup=False)
        raise typer.Exit(EXIT_FAILED) from None
