"""`python -m load_tests.tenants`: tenants of one server; see the room's README."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from configs.model_folder import PROJECT_ROOT
from load_tests.harness.client import ServerError
from load_tests.harness.server import started
from load_tests.measuring.program import (
    Block,
    JsonFile,
    chosen,
    conclude,
    one_sentence,
    progress_bar,
    stop_by_signal,
)
from load_tests.measuring.turns import turns
from load_tests.tenants.report import (
    ALONE,
    BESIDE,
    FITTING,
    HELD,
    NOT_HELD,
    ONE_TENANT,
    Found,
    Shares,
    modest,
    throughput,
)
from load_tests.tenants.servers import Scenario, Tenants

PAGE = PROJECT_ROOT / "docs" / "measured" / "scheduling.md"
BEGIN, END = "<!-- tenants: written by python -m load_tests.tenants --write-docs -->", "<!-- end of tenants -->"
QUESTIONS = ("modest", "throughput", "shares")


def main(
    rounds: Annotated[int, typer.Option(min=1, help="How often each arm has its turn.")] = 6,
    replicas: Annotated[int, typer.Option(min=1)] = Scenario.replicas,
    slots: Annotated[int, typer.Option(min=2, help="Sequences that an engine computes at once.")] = Scenario.slots,
    modest_per_s: Annotated[float, typer.Option(min=0.1, help="Requests a second.")] = Scenario.modest_per_s,
    only: Annotated[str, typer.Option(help=f"Of {', '.join(QUESTIONS)}.")] = ",".join(QUESTIONS),
    seed: int = 0,
    docs: Annotated[bool, typer.Option("--write-docs", help=f"Put the tables into {PAGE.name}.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Measure, print tables, and say which targets were missed."""
    stop_by_signal()
    plan = replace(Scenario(), replicas=replicas, slots=slots, modest_per_s=modest_per_s)
    with one_sentence(ServerError, ValueError):
        wanted = chosen("question", only.split(","), QUESTIONS)
        found = _measure(plan, wanted, rounds, seed)
    block = Block(PAGE, BEGIN, END) if docs else None
    conclude(found.markdown(), found.as_json(), json_file, found.misses, block)


def _measure(plan: Scenario, wanted: tuple[str, ...], rounds: int, seed: int) -> Found:
    p95: dict[str, list[float]] = {ALONE: [], FITTING: [], BESIDE: [], ONE_TENANT: []}
    rates: dict[str, list[float]] = {NOT_HELD: [], HELD: []}
    shares = []
    arms = [*(p95 if "modest" in wanted else ()), *(rates if "throughput" in wanted else ())]
    with progress_bar() as progress, ExitStack() as stack:
        bar = progress.add_task("arms", total=len(arms) * rounds)
        if arms:
            two, one = (
                Tenants(stack.enter_context(started(_folder(stack), plan.settings(tenants))), plan, seed)
                for tenants in (2, 1)
            )
            measures = {
                ALONE: lambda: two.modest(beside=0),
                FITTING: lambda: two.modest(beside=plan.replicas * plan.slots - 1),
                BESIDE: lambda: two.modest(beside=plan.flood),
                ONE_TENANT: lambda: one.modest(beside=plan.flood),
                HELD: two.throughput,
                NOT_HELD: one.throughput,
            }
            for turn in turns(arms, rounds):
                (p95 if turn.arm in p95 else rates)[turn.arm].append(measures[turn.arm]())
                progress.advance(bar)
            stack.close()
        for weight in plan.weights if "shares" in wanted else ():
            with tempfile.TemporaryDirectory() as folder, started(Path(folder), plan.settings(2, weight)) as server:
                shares.append(Shares(weight, Tenants(server, plan, seed).shares(weight)))
    return Found(
        plan,
        modest(p95) if "modest" in wanted else None,
        throughput(rates) if "throughput" in wanted else None,
        shares,
    )


def _folder(stack: ExitStack) -> Path:
    return Path(stack.enter_context(tempfile.TemporaryDirectory()))


if __name__ == "__main__":
    typer.run(main)
