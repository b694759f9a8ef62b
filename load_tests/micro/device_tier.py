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
import json
import os
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import track

from configs.settings import PROJECT_ROOT
from load_tests.harness.device_engine import HERE, DeviceEngine
from load_tests.harness.engine_threads import start_with_engine_threads

out = Console(stderr=True, highlight=False)
ARMS = {"least recently used": False, "hotness": True}
HOT_ASKS = 4
STREAMS = 4
STREAM_TOKENS = 400
DIRECTIVE_S = 10.0
PAUSE_S = 0.05
"""Between two directives: twenty a second, many more than a manager orders."""
KINDS = ("evict", "promote", "offload", "pin", "unpin")


def prompt(seed: int, blocks: int, block_size: int) -> list[int]:
    """Token ids without a meaning: so many whole blocks and a little more."""
    draw = random.Random(seed)
    return [draw.randrange(10, 500) for _ in range(blocks * block_size + 8)]


async def kept_after_scan(engine: DeviceEngine, blocks: int, cold: int, seed: int) -> tuple[int, int]:
    """Tokens of the hot prompt (its full blocks) that survive `cold` others, and how many they are."""
    await engine.clear()
    hot = prompt(seed, blocks, engine.block_size)
    for _ in range(HOT_ASKS):
        await engine.device_tokens(hot)
    for number in range(cold):
        await engine.device_tokens(prompt(seed * 1000 + number + 1, blocks, engine.block_size))
    return await engine.device_tokens(hot), blocks * engine.block_size


async def kept_in_mix(engine: DeviceEngine, blocks: int, requests: int, seed: int) -> tuple[int, int]:
    """Device tokens and all full-block tokens of a mix: half of the requests draw from 8 hot prompts, half are new."""
    await engine.clear()
    draw = random.Random(seed)
    hot = [prompt(seed * 77 + number, blocks, engine.block_size) for number in range(8)]
    weights = [1 / (rank + 1) for rank in range(8)]
    kept = 0
    for number in range(requests):
        new = prompt(seed * 5000 + number, blocks, engine.block_size)
        kept += await engine.device_tokens(new if draw.random() < 0.5 else draw.choices(hot, weights)[0])
    return kept, requests * blocks * engine.block_size


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


async def direct_all(engine: DeviceEngine, tokens: Sequence[int], until: asyncio.Event) -> None:
    """One directive of each kind after the other, on one prompt's blocks, until told to stop."""
    hashes = engine.hashes(tokens)
    while not until.is_set():
        for kind in KINDS:
            order: dict[str, Any] = {"kind": kind, "deadline_s": DIRECTIVE_S, "hashes": hashes, "ttl_s": DIRECTIVE_S}
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


async def decode(engine: DeviceEngine, seed: int) -> None:
    """One request that decodes for a while."""
    async for _ in engine.stream(prompt(seed, 1, engine.block_size), STREAM_TOKENS):
        pass


async def stall(engine: DeviceEngine, clock: StepClock, blocks: int, rounds: int) -> dict[str, Any]:
    """Steps with and without directives, and the slices of each kind."""
    tokens = prompt(4242, blocks, engine.block_size)
    await engine.clear()
    await engine.device_tokens(tokens)
    steps: dict[str, list[list[float]]] = {"none": [], "directives": []}
    for number in track(range(2 * rounds), "stalling", console=out):
        arm = ("none", "directives")[number % 2]
        over = asyncio.Event()
        directing = asyncio.create_task(direct_all(engine, tokens, over)) if arm == "directives" else None
        clock.take()
        await asyncio.gather(*(decode(engine, 9000 + number * STREAMS + stream) for stream in range(STREAMS)))
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


async def measure(engine: DeviceEngine, blocks: int, rounds: int) -> dict[str, Any]:
    """Everything, the arms in turn."""
    pool = (await asyncio.wrap_future(engine.reuse.pool_usage()))["blocks"]
    kept: dict[str, dict[str, list[float]]] = {arm: {"scan": [], "mix": []} for arm in ARMS}
    for number in track(range(rounds), "keeping", console=out):
        for arm, by_hotness in ARMS.items():
            await asyncio.wrap_future(engine.reuse.order_device(by_hotness))
            tokens, of = await kept_after_scan(engine, blocks, 3 * pool // blocks, number + 1)
            kept[arm]["scan"].append(tokens / of)
            tokens, of = await kept_in_mix(engine, blocks, 6 * pool // blocks, number + 1)
            kept[arm]["mix"].append(tokens / of)
    clock = StepClock(engine.thread.core)
    long = min(8 * blocks, (pool - 1) // 3)
    stalled = await stall(engine, clock, long, rounds)
    return {"pool_blocks": pool, "prompt_blocks": blocks, "directive_blocks": long, "kept": kept, **stalled}


def report(found: dict[str, Any]) -> None:
    """Markdown on stdout."""
    print(f"Device of {found['pool_blocks']} blocks; prompts of {found['prompt_blocks']}.\n")
    print("| order of free blocks | hot prompt kept after a scan of 3 pools | device hits in a mix, half of it new |")
    print("|---|---|---|")
    for arm, kept in found["kept"].items():
        print(f"| {arm} | {_spread(kept['scan'])} | {_spread(kept['mix'])} |")
    print(f"\nDirectives on {found['directive_blocks']} blocks, {STREAMS} requests decoding:\n")
    print("| directive | done | slices | mean added | worst added |")
    print("|---|---|---|---|---|")
    for row in found["slices"]:
        done = f"{row['done']} of {row['directives']}"
        print(f"| {row['kind']} | {done} | {row['slices']} | {row['mean_ms']:.2f} ms | {row['worst_ms']:.2f} ms |")
    print("\n| engine steps | p50 | p99 | worst |\n|---|---|---|---|")
    for arm, runs in found["steps"].items():
        columns = [_spread([run[name] for run in runs], "ms") for name in ("p50_ms", "p99_ms", "worst_ms")]
        print(f"| {arm} | {' | '.join(columns)} |")
    ratios = [
        with_them["p50_ms"] / without["p50_ms"]
        for without, with_them in zip(found["steps"]["none"], found["steps"]["directives"], strict=True)
    ]
    print(f"\nMedian step with directives, as a multiple of without: {_spread(ratios, 'x')}")


def _spread(values: Sequence[float], unit: str = "share") -> str:
    shown = [f"{100 * value:.0f} %" if unit == "share" else f"{value:.2f} {unit}" for value in values]
    middle = statistics.median(values)
    center = f"{100 * middle:.0f} %" if unit == "share" else f"{middle:.2f} {unit}"
    low, high = shown[values.index(min(values))], shown[values.index(max(values))]
    return center if low == high else f"{center} ({low} to {high})"


def main(
    model: Annotated[str, typer.Option(help="Folder of a model.")] = str(PROJECT_ROOT / "models" / "demo"),
    device_blocks: Annotated[int, typer.Option(help="Blocks of the device pool.")] = 200,
    prompt_blocks: Annotated[int, typer.Option(help="Blocks of each prompt.")] = 12,
    rounds: Annotated[int, typer.Option(help="How often each arm runs.")] = 3,
    json_file: Annotated[str | None, typer.Option("--json", help="A file, or - for stdout.")] = None,
) -> None:
    """Print tables; needs no server."""

    async def run() -> dict[str, Any]:
        engine = DeviceEngine(model, device_blocks, segment_tokens=256)
        try:
            return await measure(engine, prompt_blocks, rounds)
        finally:
            engine.close()

    # vLLM prints to stdout while loading; the result must stand there alone.
    result = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    found = asyncio.run(run())
    with result, contextlib.redirect_stdout(result):
        if json_file == "-":
            print(json.dumps(found, indent=2))
        else:
            report(found)
    if json_file and json_file != "-":
        Path(json_file).write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    start_with_engine_threads("load_tests.micro.device_tier")
    with contextlib.suppress(KeyboardInterrupt):
        typer.run(main)
