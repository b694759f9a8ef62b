"""Does the time to the first token follow the better of loading and recomputing? `python -m load_tests.micro.throttle`

A prompt whose KV lies in Redis is served again and again over an emulated link that becomes slower step by step. Three
arms take turns in each round: always load, always recompute, and `auto` (`kv.load_or_recompute`), which starts every
step with what it learned in the one before, and learns only from its own prompts. The first rounds of a step are where
it finds out; they are shown next to the others. A step has held when auto's median is at most 1.10 times the better of
the other two. Real vLLM, manager, Redis and tiers (`load_tests.harness.tiered_engine`); no HTTP. One arm is, for the
manager, one replica, so that no arm learns from another one's loads.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from configs.settings import load_settings
from deployments.redis_tier.server import EmbeddedRedis
from kvmanager.loading.load_choice import LoadChoice, LoadMode, PromptChoice
from kvmanager.moves.plan import PlannedLoad, PlanReason
from load_tests.harness.emulated_link import EmulatedLink
from load_tests.harness.engine import prompt, start_with_engine_threads
from load_tests.harness.models import write_random_model
from load_tests.harness.patience import PATIENCE_S, until
from load_tests.harness.tiered_engine import TieredEngine
from load_tests.harness.tiers import MIB, ImportedManager, running
from load_tests.measuring import report
from load_tests.measuring.plots import finish, new_figure, save, whiskers
from load_tests.measuring.program import (
    EngineDtype,
    JsonFile,
    ModelFolder,
    PlotFile,
    Rounds,
    conclude,
    progress_bar,
)
from load_tests.measuring.spread import Spread
from load_tests.measuring.turns import rotated

ARMS = ("load", "recompute", "auto")
STEPS = "4000,1000,300,100,50,20,10,5,2,1"
TARGET = 1.10


@dataclass(frozen=True, slots=True)
class Served:
    """One prompt: seconds to its first token, tokens from Redis, and why."""

    ttft_s: float
    redis_tokens: int
    reason: str


class ChoiceByArm(LoadChoice):
    """Each arm, a replica for the manager, has the `kv.load_or_recompute` of its name."""

    def choose(self, choice: PromptChoice, segments: Sequence[PlannedLoad]) -> tuple[int, PlanReason]:
        """See `LoadChoice.choose`."""
        self.mode = LoadMode(choice.replica)
        return super().choose(choice, segments)

    def short_tokens(self, replica: str) -> int:
        """See `LoadChoice.short_tokens`."""
        self.mode = LoadMode(replica)
        return super().short_tokens(replica)


class ManagerOfArms(ImportedManager):
    """A manager that chooses by arm."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._loads.__class__ = ChoiceByArm


class ThrottledEngine(TieredEngine):
    """A replica for each arm, over a link to Redis that can be throttled. One prompt at a time."""

    def __init__(self, server: EmbeddedRedis, model: str, folder: Path, device_blocks: int, dtype: str) -> None:
        engine = {"device_blocks": device_blocks, "max_num_seqs": 8}
        kv = {"cpu_tier_bytes": 128 * MIB, "redis_bytes": 256 * MIB, "prefetch_workers": 1}
        settings = load_settings({"model": model, "dtype": dtype, "engine": engine, "kv": kv})
        self.link = EmulatedLink(control_file=str(folder / "link"))
        self.link.throttle(0.0)
        super().__init__("throttle", settings, server, ARMS, self.link, ManagerOfArms)

    async def store(self, tokens: Sequence[int]) -> None:
        """Compute a prompt, wait until Redis has its KV, and empty the device and the CPU tier."""
        self.use("recompute")
        await self.serve([tokens], 1)
        hashes = self.hashes(tokens)

        def in_redis() -> bool:
            self.keep_alive()
            return bool(self.tiers.ask("api", "lookup", hashes)["redis"] >= len(hashes))

        await asyncio.to_thread(until, in_redis, "Redis has the prompt's KV", PATIENCE_S)
        await self.forget("cpu")

    async def served(self, arm: str, tokens: Sequence[int]) -> Served:
        """One stored prompt by one arm; then the device and the CPU tier are emptied."""
        self.use(arm)
        self.keep_alive()
        found = await self.serve([tokens], 1)
        await self.forget("cpu")
        return Served(found.ttft_s, found.usage["redis"], found.usage["reason"])


async def measure(
    engine: ThrottledEngine, steps: Sequence[float], tokens: int, rounds: int, learning: int, warm_up: int
) -> list[dict[str, Any]]:
    """All steps."""
    rows = []
    with progress_bar() as progress:
        bar = progress.add_task("prompts", total=warm_up + len(steps) * (learning + rounds) * len(ARMS))
        for number in range(warm_up):
            words = prompt(1 + number, tokens * (1 + number % 4) // 4)
            await engine.store(words)
            for arm in ARMS:
                await engine.served(arm, words)
            progress.advance(bar)
        words = prompt(0, tokens)
        await engine.store(words)
        for bytes_per_s in steps:
            engine.link.throttle(bytes_per_s)
            served: dict[str, list[Served]] = {arm: [] for arm in ARMS}
            for number in range(learning + rounds):
                for arm in rotated(ARMS, number):
                    served[arm].append(await engine.served(arm, words))
                    progress.advance(bar)
            rows.append({"bytes_per_s": bytes_per_s, **summary(served, learning)})
    return rows


def summary(served: dict[str, list[Served]], learning: int) -> dict[str, Any]:
    """One step."""
    after = {arm: Spread.of([one.ttft_s for one in found[learning:]]) for arm, found in served.items()}
    reasons = [one.reason for one in served["auto"][learning:]]
    return {
        "ttft_s": {arm: spread.as_list() for arm, spread in after.items()},
        "ratio": after["auto"].median / min(after["load"].median, after["recompute"].median),
        "learning_auto_s": [one.ttft_s for one in served["auto"][:learning]],
        "reasons": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
        "prompts": {arm: [asdict(one) for one in found] for arm, found in served.items()},
    }


def table(rows: Sequence[dict[str, Any]], tokens: int, rounds: int, learning: int) -> str:
    """Markdown."""
    head = ["link, MB/s", "always load", "always recompute", "auto", "auto / the better", "why", "while learning, auto"]
    body = [
        [
            f"{row['bytes_per_s'] / 1e6:g}",
            *(Spread(*row["ttft_s"][arm]).slashed(".0f", 1e3) for arm in ARMS),
            f"{row['ratio']:.2f}",
            ", ".join(f"{reason} {count}" for reason, count in row["reasons"].items()),
            ", ".join(f"{1e3 * value:.0f}" for value in row["learning_auto_s"]),
        ]
        for row in rows
    ]
    worst = max(row["ratio"] for row in rows)
    verdict = "held" if worst <= TARGET else "not held"
    return "\n\n".join(
        [
            f"{tokens} tokens; {rounds} rounds after {learning} to learn; TTFT in ms, min / median / max.",
            report.table(head, body),
            f"Worst ratio {worst:.2f}; target {TARGET:.2f}: {verdict}.",
        ]
    )


def plot(rows: Sequence[dict[str, Any]], path: str) -> None:
    """TTFT by the link's rate: medians, and bars from the least to the most."""
    figure = new_figure(7, 4.5)
    axes = figure.add_subplot()
    rates = [row["bytes_per_s"] / 1e6 for row in rows]
    for arm, style in zip(ARMS, ("o--", "s--", "D-"), strict=True):
        spreads = [Spread(*row["ttft_s"][arm]) for row in rows]
        label = arm if arm == "auto" else f"always {arm}"
        medians = [spread.median for spread in spreads]
        axes.errorbar(rates, medians, yerr=whiskers(spreads), fmt=style, capsize=3, label=label)
    finish(axes, "Redis link, MB/s", "time to first token, s", ylog=True)
    axes.set_xscale("log")
    axes.invert_xaxis()
    save(figure, path, dpi=150)


def main(
    rounds: Rounds = 11,
    learning: Annotated[int, typer.Option(min=0, help="Rounds before, at each step.")] = 5,
    warm_up: Annotated[
        int, typer.Option(min=4, help="Stored prompts of different lengths that each arm serves before the first step.")
    ] = 8,
    tokens: Annotated[int, typer.Option(min=256, help="Tokens of the prompt.")] = 2048,
    steps: Annotated[str, typer.Option(help="Megabytes per second, in this order.")] = STEPS,
    model: ModelFolder = None,
    dtype: EngineDtype = "auto",
    json_file: JsonFile = None,
    plot_file: PlotFile = None,
) -> None:
    """Measure, and print a Markdown table; exit code 1 when the target is missed."""
    rates = [1e6 * float(step) for step in steps.split(",")]
    with tempfile.TemporaryDirectory() as name, running() as server:
        folder = Path(name)
        chosen = model or write_random_model(folder / "random-qwen2")
        engine = ThrottledEngine(server, chosen, folder, 4 * tokens // 32, dtype)
        try:
            rows = asyncio.run(measure(engine, rates, tokens, rounds, learning, warm_up))
        finally:
            engine.close()
    made = {"tokens": tokens, "dtype": dtype, "rounds": rounds, "learning": learning, "steps": rows}
    if plot_file:
        plot(rows, plot_file)
    worst = max(row["ratio"] for row in rows)
    missed = [f"Missed: {worst:.3f} of the better way; the target is at most {TARGET:g}."] if worst > TARGET else []
    conclude(table(rows, tokens, rounds, learning), made, json_file, missed)


if __name__ == "__main__":
    start_with_engine_threads("load_tests.micro.throttle")
    typer.run(main)
