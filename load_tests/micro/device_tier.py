"""What directing the device tier brings and costs, on a real engine: `python -m load_tests.micro.device_tier`.

*Keeping*: a hot prompt is asked for a few times, then cold prompts that fill the device several times over, then the
hot one again; and a mix of a few hot prompts and many cold ones. How much of the prompts does the device still hold,
with vLLM's own order of free blocks (least recently used) and by the manager's hotness?

*Stalling*: requests decode while directives of every kind are carried out, and while none is. How long does one slice
of a directive take from the engine, and how long are the engine's steps? The arms take turns.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import statistics
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer
from rich.progress import track

from configs.settings import PROJECT_ROOT, load_settings
from load_tests.harness.engine import Engine, prompt, start_with_engine_threads
from load_tests.harness.memory_port import HERE, BrainPort
from load_tests.measuring import report
from load_tests.measuring.command import JsonFile, Rounds, out
from load_tests.measuring.comparison import Comparison
from load_tests.measuring.spread import Spread
from load_tests.measuring.turns import turns

ARMS = {"least recently used": False, "hotness": True}
HOT_ASKS = 4
STREAMS = 4
STREAM_TOKENS = 400
DIRECTIVE_S = 10.0
PAUSE_S = 0.05
"""Between two directives: twenty a second, many more than a manager orders."""
KEPT = ("order of free blocks", "hot prompt kept after a scan of 3 pools", "device hits in a mix, half of it new")
KINDS = ("evict", "promote", "offload")


def whole(seed: int, blocks: int, block_tokens: int) -> list[int]:
    """A prompt of so many whole blocks and a little more."""
    return prompt(seed, blocks * block_tokens + 8)


class DirectedEngine(Engine):
    """An engine over a brain in this process, which directs its device."""

    def __init__(self, model: str, device_blocks: int) -> None:
        engine = {"device_blocks": device_blocks, "max_num_seqs": 16, "log_stats": False}
        kv = {"segment_tokens": 256, "load_deadline_s": 30.0}
        settings = load_settings({"model": model, "engine": engine, "kv": kv})
        super().__init__(settings, BrainPort(settings.blocks_per_segment))

    async def device_tokens(self, tokens: Sequence[int]) -> int:
        """Ask for a short answer; returns how many of the prompt's tokens the device still had."""
        return int((await self.serve([tokens], 1)).usage["device"])

    async def clear(self) -> None:
        """Empty the device and the tier."""
        self.port.lose_all()
        await asyncio.wrap_future(self.reuse.clear_device())


async def kept_after_scan(engine: DirectedEngine, blocks: int, cold: int, seed: int) -> tuple[int, int]:
    """Tokens of the hot prompt (its full blocks) that survive `cold` others, and how many they are."""
    await engine.clear()
    hot = whole(seed, blocks, engine.block_tokens)
    for _ in range(HOT_ASKS):
        await engine.device_tokens(hot)
    for number in range(cold):
        await engine.device_tokens(whole(seed * 1000 + number + 1, blocks, engine.block_tokens))
    return await engine.device_tokens(hot), blocks * engine.block_tokens


async def kept_in_mix(engine: DirectedEngine, blocks: int, requests: int, seed: int) -> tuple[int, int]:
    """Device tokens and all full-block tokens of a mix: half of the requests draw from 8 hot prompts, half are new."""
    await engine.clear()
    draw = random.Random(seed)
    hot = [whole(seed * 77 + number, blocks, engine.block_tokens) for number in range(8)]
    weights = [1 / (rank + 1) for rank in range(8)]
    kept = 0
    for number in range(requests):
        new = whole(seed * 5000 + number, blocks, engine.block_tokens)
        kept += await engine.device_tokens(new if draw.random() < 0.5 else draw.choices(hot, weights)[0])
    return kept, requests * blocks * engine.block_tokens


class StepClock:
    """Times from one step's start to the next: the step, and whatever came in between."""

    def __init__(self, core: Any) -> None:
        self.seconds: list[float] = []
        self._step, self._last = core.step_fn, 0.0
        core.step_fn = self

    def __call__(self) -> Any:
        """One step of the engine."""
        now = time.perf_counter()
        if self._last:
            self.seconds.append(now - self._last)
        outputs, executed = self._step()
        self._last = now if executed else 0.0
        return outputs, executed

    def take(self) -> list[float]:
        """The steps since the last call."""
        taken, self.seconds = self.seconds, []
        return taken


async def direct_all(engine: DirectedEngine, tokens: Sequence[int], until: asyncio.Event) -> None:
    """One directive of each kind after the other, on one prompt's blocks, until told to stop."""
    hashes = engine.hashes(tokens)
    while not until.is_set():
        for kind in KINDS:
            order: dict[str, Any] = {"kind": kind, "deadline_s": DIRECTIVE_S, "hashes": hashes}
            plan = None
            if kind == "promote":
                plan = engine.port.plan(hashes, used=False)
                order.update({name: plan[name] for name in ("segments", "scores", "now", "epoch")})
            elif kind == "offload":
                engine.port.lose_all()
                with engine.port.lock:
                    order["spans"] = engine.port.brain.offloads.lacking("replica", hashes, HERE)
            await engine.orders.carry_out(order)
            await asyncio.sleep(PAUSE_S)
            if plan is not None:
                engine.port.release(plan["lease_id"])


async def stall(engine: DirectedEngine, clock: StepClock, blocks: int, rounds: int) -> dict[str, Any]:
    """Steps with and without directives, and the slices of each kind."""
    tokens = whole(4242, blocks, engine.block_tokens)
    await engine.clear()
    await engine.device_tokens(tokens)
    steps: dict[str, list[list[float]]] = {"none": [], "directives": []}
    for number, (_, arm) in enumerate(track(list(turns(list(steps), rounds)), "stalling", console=out)):
        over = asyncio.Event()
        directing = asyncio.create_task(direct_all(engine, tokens, over)) if arm == "directives" else None
        clock.take()
        seeds = range(9000 + number * STREAMS, 9000 + (number + 1) * STREAMS)
        await engine.serve([whole(seed, 1, engine.block_tokens) for seed in seeds], STREAM_TOKENS)
        steps[arm].append(clock.take()[STREAMS:])  # without the prefills
        over.set()
        if directing is not None:
            await directing
    slices = []
    for metric in engine.orders.times.registry.collect():
        for kind in KINDS:
            found = {s.name.rpartition("_")[2]: s.value for s in metric.samples if s.labels == {"kind": kind}}
            if found.get("count"):
                slices.append(
                    {
                        "kind": kind,
                        "directives": sum(n for (k, _), n in engine.orders.counters.items() if k == kind),
                        "done": engine.orders.counters[kind, "done"],
                        "outcomes": {o: n for (k, o), n in engine.orders.counters.items() if k == kind},
                        "slices": int(found["count"]),
                        "mean_ms": 1e3 * found["sum"] / found["count"],
                        "worst_ms": 1e3 * engine.orders.times.worst[kind],
                    }
                )
    return {"slices": slices, "steps": {arm: [_steps(each) for each in found] for arm, found in steps.items()}}


def _steps(seconds: Sequence[float]) -> dict[str, float]:
    cuts = statistics.quantiles(seconds, n=100)
    return {"steps": len(seconds), "p50_ms": 1e3 * cuts[49], "p99_ms": 1e3 * cuts[98], "worst_ms": 1e3 * max(seconds)}


async def measure(engine: DirectedEngine, blocks: int, rounds: int) -> dict[str, Any]:
    """Everything, the arms in turn."""
    pool = (await asyncio.wrap_future(engine.reuse.pool_usage()))["blocks"]
    kept: dict[str, dict[str, list[float]]] = {arm: {"scan": [], "mix": []} for arm in ARMS}
    for number, arm in track(list(turns(list(ARMS), rounds)), "keeping", console=out):
        await asyncio.wrap_future(engine.reuse.order_device(ARMS[arm]))
        tokens, of = await kept_after_scan(engine, blocks, 3 * pool // blocks, number + 1)
        kept[arm]["scan"].append(tokens / of)
        tokens, of = await kept_in_mix(engine, blocks, 6 * pool // blocks, number + 1)
        kept[arm]["mix"].append(tokens / of)
    clock = StepClock(engine.thread.core)
    long = min(8 * blocks, (pool - 1) // 3)
    stalled = await stall(engine, clock, long, rounds)
    return {"pool_blocks": pool, "prompt_blocks": blocks, "directive_blocks": long, "kept": kept, **stalled}


def table(found: dict[str, Any]) -> str:
    """Markdown."""
    kept = [[arm, *(_share(of[name]) for name in ("scan", "mix"))] for arm, of in found["kept"].items()]
    slices = [
        [
            row["kind"],
            f"{row['done']} of {row['directives']}",
            str(row["slices"]),
            *(f"{row[name]:.2f} ms" for name in ("mean_ms", "worst_ms")),
        ]
        for row in found["slices"]
    ]
    columns = ("p50_ms", "p99_ms", "worst_ms")
    steps = [
        [arm, *(f"{Spread.of([run[name] for run in runs]).bracketed('.2f')} ms" for name in columns)]
        for arm, runs in found["steps"].items()
    ]
    p50 = {arm: [run["p50_ms"] for run in runs] for arm, runs in found["steps"].items()}
    times = Comparison("steps", "ms", "none", p50).ratio("directives").bracketed(".2f")
    return "\n\n".join(
        [
            f"Device of {found['pool_blocks']} blocks; prompts of {found['prompt_blocks']}.",
            report.table(KEPT, kept),
            f"Directives on {found['directive_blocks']} blocks, {STREAMS} requests decoding:",
            report.table(["directive", "done", "slices", "mean added", "worst added"], slices),
            report.table(["engine steps", "p50", "p99", "worst"], steps),
            f"Median step with directives, as a multiple of without: {times}",
        ]
    )


def _share(values: Sequence[float]) -> str:
    return Spread.of(values).bracketed(".0f", 100) + " %"


def main(
    model: Annotated[str, typer.Option(help="Folder of a model.")] = str(PROJECT_ROOT / "models" / "demo"),
    device_blocks: Annotated[int, typer.Option(help="Blocks of the device pool.")] = 200,
    prompt_blocks: Annotated[int, typer.Option(help="Blocks of each prompt.")] = 12,
    rounds: Rounds = 3,
    json_file: JsonFile = None,
) -> None:
    """Print tables; needs no server."""

    async def run() -> dict[str, Any]:
        engine = DirectedEngine(model, device_blocks)
        try:
            return await measure(engine, prompt_blocks, rounds)
        finally:
            engine.close()

    # vLLM prints to stdout while loading; the result must stand there alone.
    result = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    found = asyncio.run(run())
    with result, contextlib.redirect_stdout(result):
        report.deliver(table(found), found, json_file)


if __name__ == "__main__":
    start_with_engine_threads("load_tests.micro.device_tier")
    with contextlib.suppress(KeyboardInterrupt):
        typer.run(main)
