"""`make bench-scenarios`: each scenario beside the defaults, on a workload that fits it; see the room's README.

What is interrupted is reported as far as all arms have it. Exit codes: 0 measured, 2 something is missing or wrong (one
sentence says what), 130 interrupted.
"""

from __future__ import annotations

import contextlib
import random
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from configs.model_folder import DEMO_MODEL, PROJECT_ROOT
from load_tests.bench.choice import default_dtype
from load_tests.harness.client import ServerError as ClientError
from load_tests.harness.models import SHAPES, ModelError, model_folder, token_counter
from load_tests.harness.running_server import RunningServer, ServerError, started
from load_tests.measuring.command import (
    EXIT_STOPPED,
    JsonFile,
    Rounds,
    chosen,
    one_sentence,
    progress_bar,
    stop_by_signal,
)
from load_tests.measuring.processes import machine_line
from load_tests.measuring.report import deliver, write_between
from load_tests.measuring.turns import turns
from load_tests.peers.engine import Dtype
from load_tests.scenarios.measure import Round, one_round
from load_tests.scenarios.report import Found
from load_tests.scenarios.uses import DEFAULTS, DEVICE_TOKENS, LONGEST, SCENARIO, USES, Use
from load_tests.workloads import Words

DEMO = "demo"
BLOCK_TOKENS = 32
PAGE = PROJECT_ROOT / "docs" / "measured" / "scenarios.md"
BEGIN = "<!-- {name}: written by python -m load_tests.scenarios --only {name} --write-docs -->"
END = "<!-- end of {name} -->"


@dataclass(frozen=True)
class Plan:
    """What is measured with what; `rounds` of each arm, after one that does not count."""

    model: str
    dtype: Dtype
    rounds: int
    seed: int

    @property
    def folder(self) -> Path:
        """Of the model."""
        return PROJECT_ROOT / DEMO_MODEL if self.model == DEMO else model_folder(self.model)

    def settings(self, scenario: str | None) -> dict[str, Any]:
        """One replica, whose device holds two of the longest prompts. Nothing that a scenario sets is set here."""
        return {
            "model": str(self.folder),
            "dtype": self.dtype,
            "replicas": 1,
            "max_model_len": LONGEST,
            "engine": {"device_blocks": DEVICE_TOKENS // BLOCK_TOKENS + 1},
            "blending": {"separators": ["<|user|>" if self.model == DEMO else "<|im_start|>"]},
            **({"scenario": scenario} if scenario else {}),
        }

    def measured(self, use: Use, advance: Callable[[], object]) -> Found:
        """Both servers of one scenario; interrupted, what was complete by then. Raises ServerError."""
        text = Words(token_counter(self.folder))
        rounds: dict[str, list[Round]] = {arm: [] for arm in use.arms}
        with ExitStack() as stack, contextlib.suppress(KeyboardInterrupt):
            plain, special = (self._server(stack, scenario) for scenario in (None, use.scenario))
            for turn in turns(use.arms, self.rounds, warm_up=1):
                workload = use.workload(random.Random(f"{self.seed}/{use.scenario}/{turn.round}"), text)
                server = special if turn.arm == SCENARIO else plain
                one = one_round(server, self.folder.name, workload, use, use.body(turn.arm))
                if turn.counts:
                    rounds[turn.arm].append(one)
                advance()
        complete = min(map(len, rounds.values()))
        if not complete:
            raise KeyboardInterrupt
        return Found(use, {arm: own[:complete] for arm, own in rounds.items()})

    def _server(self, stack: ExitStack, scenario: str | None) -> RunningServer:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="crosskv-scenario-"))
        return stack.enter_context(started(Path(folder), self.settings(scenario)))

    def setting(self, rounds: int) -> list[str]:
        """For whoever reads the tables."""
        return [machine_line(), f"{self.model}, {self.dtype}, one replica, {rounds} rounds, seed {self.seed}"]


def main(
    only: Annotated[str, typer.Option(help=f"With commas between them: {', '.join(USES)}.")] = ",".join(USES),
    rounds: Rounds = 6,
    model: Annotated[str, typer.Option(help=f"Of {', '.join((DEMO, *SHAPES))}.")] = DEMO,
    dtype: Annotated[Dtype | None, typer.Option(help="Default: as `dtype: auto` has it.")] = None,
    seed: int = 0,
    docs: Annotated[bool, typer.Option("--write-docs", help=f"Put the tables into {PAGE.name}.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Measure each scenario beside the defaults, and print the tables."""
    stop_by_signal()
    pages, documents = [], []
    with one_sentence(ModelError, ServerError, ClientError, ValueError):
        wanted = chosen("scenario", only.split(","), USES)
        chosen("model", [model], (DEMO, *SHAPES))
        plan = Plan(model, dtype or default_dtype(), rounds, seed)
        with progress_bar("arms") as progress:
            bar = progress.add_task("", total=sum(len(USES[name].arms) for name in wanted) * (rounds + 1))
            for name in wanted:
                progress.update(bar, description=name)
                found = plan.measured(USES[name], lambda: progress.advance(bar))
                page = found.markdown(plan.setting(found.complete))
                if docs:
                    write_between(PAGE, BEGIN.format(name=name), END.format(name=name), page)
                pages.append(f"## {name}\n\n{page}")
                documents.append(found.as_dict())
                if found.complete < rounds:
                    break
    setting = plan.setting(rounds)
    deliver("\n\n".join(pages), {"setting": setting, "base": DEFAULTS, "scenarios": documents}, json_file)
    if any(one["complete"] < rounds for one in documents):
        raise typer.Exit(EXIT_STOPPED)


if __name__ == "__main__":
    typer.run(main)
