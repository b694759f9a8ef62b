"""Policies and step budgets through the whole server: `python -m load_tests.scheduling`

Exit codes: 0 measured; 1 measured, but a target was missed; 2 something is missing or wrong (one sentence says what).
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Annotated

import typer

from app.launch.descendants import become_subreaper
from configs.model_folder import PROJECT_ROOT
from configs.settings import SettingsError
from load_tests.harness.client import ServerError
from load_tests.harness.models import ModelError, model_folder
from load_tests.measuring.processes import machine_line
from load_tests.measuring.program import JsonFile, chosen, conclude, one_sentence, out, stop_by_signal
from load_tests.measuring.turns import turns
from load_tests.scheduling import report
from load_tests.scheduling.gaps import Gaps, measure_gaps
from load_tests.scheduling.mixed import MixedJob, Run, jobs_of, run_mixed, undisturbed
from load_tests.scheduling.servers import FCFS, MLFQ, SHORTEST, counted, forget, server

POLICIES, TARGET = "policies", "target"
DEMO = "demo"
TARGET_SHARE = 0.4
"""Where the target lies between a step that only decodes and the longest one."""


class _Found:
    def __init__(self) -> None:
        self.runs: dict[str, list[Run]] = {}
        self.counts: dict[str, dict[str, float]] = {}
        self.wrong: dict[str, tuple[int, int]] = {}
        self.target_s: float | None = None
        self.without: list[Gaps] = []
        self.held: list[Gaps] = []


def main(
    parts: Annotated[str, typer.Option(help=f"Of {POLICIES}, {TARGET}.")] = f"{POLICIES},{TARGET}",
    arms: Annotated[str, typer.Option(help="Schedulers; fcfs is what they are compared with.")] = "fcfs,shortest,mlfq",
    jobs: Annotated[int, typer.Option(min=10, help="Of each seed.")] = 120,
    seeds: Annotated[int, typer.Option(min=1, help="Loads of each arm in each alternation.")] = 3,
    alternations: Annotated[int, typer.Option(min=1, help="How often each arm has its turn, with new seeds.")] = 2,
    load: Annotated[float, typer.Option(min=0.1, help="Arrivals over what the slots hold.")] = 1.2,
    long_prompts: Annotated[int, typer.Option(min=2, help="Of each measurement of gaps.")] = 12,
    model: Annotated[str, typer.Option(help="Of the policies: demo, 10m or 40m.")] = DEMO,
    target_model: Annotated[str, typer.Option(help="Of the target; steps of demo are too short for a client.")] = "40m",
    first_seed: Annotated[int, typer.Option()] = 1,
    start_s: Annotated[float, typer.Option(min=1, help="Longest start of a server, in seconds.")] = 300.0,
    json_file: JsonFile = None,
    write_docs: Annotated[bool, typer.Option("--write-docs", help=f"Write the tables into {report.PAGE}.")] = False,
) -> None:
    """Measure, and print ratios."""
    stop_by_signal()
    become_subreaper()
    found = _Found()
    with one_sentence(ModelError, ServerError, SettingsError, ValueError), tempfile.TemporaryDirectory() as logs:
        wanted = chosen("part", parts.split(","), (POLICIES, TARGET))
        names = chosen("arm", f"{FCFS},{arms}".split(","), (FCFS, SHORTEST, MLFQ))
        if POLICIES in wanted:
            served = _folder(model)
            _policies(found, names, served, jobs, seeds, alternations, load, first_seed, start_s, Path(logs))
        if TARGET in wanted:
            _target(found, _folder(target_model), long_prompts, alternations, first_seed, start_s, Path(logs))
    whole = (found.runs, found.counts, found.wrong, found.target_s, found.without, found.held)
    said = report.misses(*whole)
    text = []
    if found.runs:
        text += [report.policy_table(found.runs), report.kept_table(found.counts, found.wrong)]
    if found.target_s is not None:
        text.append(report.gap_table(found.target_s, found.without, found.held))
    text.append(machine_line())
    made = report.as_json(*whole, said, machine_line())
    in_block = "\n\n".join([*text[:-1], f"*{text[-1]}*"])
    conclude("\n\n".join([*text, *said]), made, json_file, said, report.BLOCK if write_docs else None, in_block)


def _folder(model: str) -> str:
    return str(PROJECT_ROOT / "models" / DEMO if model == DEMO else model_folder(model))


def _policies(
    found: _Found, arms: tuple[str, ...], model: str, count: int, seeds: int, alternations: int, load: float,
    first_seed: int, start_s: float, logs: Path,
) -> None:  # fmt: skip
    numbers = range(first_seed, first_seed + seeds * alternations)
    loads: dict[int, list[MixedJob]] = {seed: jobs_of(seed, count) for seed in numbers}
    alone: dict[int, list[str]] = {}
    rates = []
    name = Path(model).name
    out.print("undisturbed answers: starting")
    with server(model, {"scheduler": FCFS}, start_s, logs / "alone.log") as first:
        for seed, jobs in loads.items():
            alone[seed], per_s = asyncio.run(undisturbed(first.url, name, jobs))
            rates.append(per_s)
            forget(first.url)
    per_s = load * sorted(rates)[len(rates) // 2]
    out.print(f"the slots hold {per_s / load:.1f} jobs a second; {per_s:.1f} come")
    for turn in turns(arms, alternations):
        out.print(f"alternation {turn.round + 1} of {alternations}, {turn.arm}: starting")
        with server(model, {"scheduler": turn.arm}, start_s, logs / f"{turn.arm}-{turn.round}.log") as mine:
            asyncio.run(undisturbed(mine.url, name, jobs_of(-1 - turn.round, 12)))  # rates are learned
            for seed in list(numbers)[turn.round * seeds : (turn.round + 1) * seeds]:
                forget(mine.url)
                run = asyncio.run(run_mixed(mine.url, name, loads[seed], per_s))
                wrong = sum(one != other for one, other in zip(run.answers, alone[seed], strict=True))
                before = found.wrong.get(turn.arm, (0, 0))
                found.wrong[turn.arm] = before[0] + wrong, before[1] + len(run.answers)
                found.runs.setdefault(turn.arm, []).append(run)
                out.print(f"  seed {seed}: mean {run.mean_s:.2f} s, short p95 {run.short_p95_s:.2f} s, wrong {wrong}")
            if turn.arm != FCFS:
                sums = found.counts.setdefault(turn.arm, {})
                for key, value in counted(mine.url).items():
                    sums[key] = sums.get(key, 0.0) + value


def _target(
    found: _Found, model: str, prompts: int, alternations: int, first_seed: int, start_s: float, logs: Path
) -> None:
    name = Path(model).name
    for number in range(alternations):
        seed = first_seed + number
        out.print(f"alternation {number + 1} of {alternations}, no target: starting")
        with server(model, {}, start_s, logs / f"none-{number}.log") as plain:
            asyncio.run(measure_gaps(plain.url, name, -seed, 2))
            without = asyncio.run(measure_gaps(plain.url, name, seed, prompts))
        if found.target_s is None:
            found.target_s = without.quiet_p50_s + TARGET_SHARE * (without.p99_s - without.quiet_p50_s)
        out.print(f"alternation {number + 1} of {alternations}, target {found.target_s * 1e3:.1f} ms: starting")
        with server(model, {"tpot_target_s": found.target_s}, start_s, logs / f"held-{number}.log") as held:
            asyncio.run(measure_gaps(held.url, name, -seed, 2))
            found.held.append(asyncio.run(measure_gaps(held.url, name, seed, prompts)))
        found.without.append(without)
        out.print(f"  gaps p99 {without.p99_s * 1e3:.1f} and {found.held[-1].p99_s * 1e3:.1f} ms")


if __name__ == "__main__":
    typer.run(main)
