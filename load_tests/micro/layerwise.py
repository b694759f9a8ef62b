"""What layerwise transfer hides: `python -m load_tests.micro.layerwise`.

*Loading*. The beginning of a prompt lies behind an emulated link, its rest must be computed; the link is as fast as it
takes for loading to last a given share of computing the rest (measured in the same call, with the beginning on the
device). How long until the first token when the layers come one after the other under the computation, when the whole
beginning is loaded before it (load, then compute), and when the scheduler chooses? The link brings the same bytes at
the same rate either way: all of one segment after the other, or a group of layers of all segments after the other.

*Saving*. A prompt is computed and some tokens decoded. How long until the first token, per further token, and until all
of the prompt is stored, when its layers are saved under the computation, and when it is saved between steps?

The arms take turns, in one process; ratios are of one round's arms. A real engine, its index in this process, no Ray.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import typer
from rich.console import Console
from rich.progress import track

from configs.model_folder import DEMO_MODEL
from deployments.kv_port import LayerArrival, PlannedLoad, SaveGrant
from deployments.kv_transfer import SaveJob
from kvmanager.segment_format import body_offset
from kvmanager.segments import SegmentSpan
from load_tests.harness.device_engine import BrainPort, DeviceEngine
from load_tests.harness.engine_threads import start_with_engine_threads

out = Console(stderr=True, highlight=False)
Mode: TypeAlias = Literal["on", "off", "auto"]
ARMS: dict[str, Mode] = {"layerwise": "on", "load, then compute": "off", "as the scheduler chooses": "auto"}
SEGMENT_TOKENS = 256
WARM_UP = 12
"""Loads before the first round: the scheduler knows nothing before it has measured eight."""
DECODED = 32


class LinkedPort(BrainPort):
    """A tier behind a link of `bytes_per_s`; one that can bring layers, a group of all segments after the other."""

    bytes_per_s = float("inf")

    def __init__(self, blocks_per_segment: int) -> None:
        super().__init__(blocks_per_segment)
        self.stored_at: dict[bytes, float] = {}
        """When each segment was stored, on `time.perf_counter`'s clock."""

    def store(self, grant: SaveGrant, segments: Sequence[tuple[SegmentSpan, Any]]) -> int:
        """See `KVPort`."""
        kept = super().store(grant, segments)
        self.stored_at.update((span.key, time.perf_counter()) for span, _ in segments)
        return kept

    def fetch(self, loads: Sequence[PlannedLoad], deadline: float) -> Iterator[memoryview | None]:
        """All of one segment after the other."""
        due = time.monotonic()
        for sealed in super().fetch(loads, deadline):
            due = self._pace(due, len(sealed or b""))
            yield sealed

    def fetch_layers(
        self, loads: Sequence[PlannedLoad], group_ends: Sequence[int], deadline: float
    ) -> Iterator[LayerArrival]:
        """A group of layers of all segments after the other, each into a buffer of its own."""
        stored = [sealed for sealed in super().fetch(loads, deadline) if sealed is not None]
        buffers = [memoryview(bytearray(len(sealed))) for sealed in stored]
        layers = group_ends[-1]
        body = body_offset(layers)
        due = time.monotonic()
        for start, end in zip((0, *group_ends), group_ends, strict=False):
            for number, (sealed, buffer) in enumerate(zip(stored, buffers, strict=True)):
                layer_bytes = (len(sealed) - body) // layers
                first, last = body + start * layer_bytes if start else 0, body + end * layer_bytes
                due = self._pace(due, last - first)
                buffer[first:last] = sealed[first:last]
                yield LayerArrival(number, buffer.toreadonly(), end)
        if len(stored) < len(loads):
            yield LayerArrival(len(stored), None, 0)

    def _pace(self, due: float, nbytes: int) -> float:
        """Sleep until so many bytes more have come; returns when the link is free again."""
        due += nbytes / self.bytes_per_s
        time.sleep(max(0.0, due - time.monotonic()))
        return due


async def answer(
    engine: DeviceEngine, tokens: Sequence[int], max_tokens: int = 1
) -> tuple[float, float, dict[str, Any]]:
    """Seconds to the first token, seconds per further token, and where the prompt's KV came from."""
    from deployments.wire import KV_CACHE_USAGE

    began = time.perf_counter()
    first = last = began
    usage: dict[str, Any] = {}
    async for output in engine.stream(tokens, max_tokens):
        last = time.perf_counter()
        first = last if first == began else first
        usage = (output.kv_transfer_params or {}).get(KV_CACHE_USAGE, usage)
    return first - began, (last - first) / max(1, max_tokens - 1), usage


async def empty_device(engine: DeviceEngine) -> None:
    """When nothing is being saved any more, the device forgets all."""
    saved = threading.Event()
    engine.reuse.transfer.submit_save(SaveJob([], [], saved.set))
    await asyncio.to_thread(saved.wait)
    await asyncio.wrap_future(engine.reuse.clear_device())


def prompt(seed: int, tokens: int) -> list[int]:
    """Token ids without a meaning."""
    draw = random.Random(seed)
    return [draw.randrange(10, 500) for _ in range(tokens)]


async def loading(
    engine: DeviceEngine, prefix_tokens: int, rest_tokens: int, share: float, rounds: int
) -> dict[str, Any]:
    """One share of loading to computing; all arms in each round."""
    port: Any = engine.port
    choice = engine.reuse.layerwise.choice
    prefix = prompt(1, prefix_tokens)
    seeds = iter(range(int(share * 1000) * 100_000 + 1, 10**9))
    port.bytes_per_s = float("inf")
    await answer(engine, prefix)
    computed = []
    for _ in range(3):  # the beginning is on the device
        seconds, _, usage = await answer(engine, prefix + prompt(next(seeds), rest_tokens))
        assert usage["device"] >= prefix_tokens - SEGMENT_TOKENS, usage
        computed.append(seconds)
    compute_s = statistics.median(computed)
    kv_bytes = engine.reuse.copier.block_bytes * (prefix_tokens // engine.block_size)
    port.bytes_per_s = kv_bytes / (share * compute_s)
    ttft: dict[str, list[float]] = {arm: [] for arm in ARMS}
    layerwise: dict[str, int] = dict.fromkeys(ARMS, 0)
    choice.mode = "off"
    for _ in range(WARM_UP):
        await empty_device(engine)
        await answer(engine, prefix + prompt(next(seeds), rest_tokens))
    for number in track(range(rounds), f"loading takes {share:g} of computing", console=out):
        arms = list(ARMS)
        shift = number % len(arms)
        for arm in arms[shift:] + arms[:shift]:
            await empty_device(engine)
            choice.mode = ARMS[arm]
            loads = engine.reuse.transfer.counters.loads_layerwise
            seconds, _, usage = await answer(engine, prefix + prompt(next(seeds), rest_tokens))
            assert usage["cpu"] >= prefix_tokens - SEGMENT_TOKENS, usage
            ttft[arm].append(seconds)
            layerwise[arm] += engine.reuse.transfer.counters.loads_layerwise - loads
    whole = ttft["load, then compute"]
    return {
        "load_share": share,
        "compute_s": compute_s,
        "bytes_per_s": port.bytes_per_s,
        "arms": {
            arm: {
                "ttft_s": spread(seconds),
                "ratio": spread([mine / theirs for mine, theirs in zip(seconds, whole, strict=True)]),
                "layerwise": layerwise[arm] / rounds,
            }
            for arm, seconds in ttft.items()
        },
    }


async def saving(engine: DeviceEngine, tokens: int, rounds: int) -> dict[str, Any]:
    """Saved under the computation, against saved between steps."""
    port: Any = engine.port
    port.bytes_per_s = float("inf")
    found: dict[bool, dict[str, list[float]]] = {
        saves: {"ttft_s": [], "tpot_s": [], "stored_s": []} for saves in (True, False)
    }
    wanted = tokens // engine.block_size * engine.block_size
    for number in track(range(rounds + 1), "saving", console=out):
        for saves in (True, False) if number % 2 else (False, True):
            await empty_device(engine)
            engine.reuse.layerwise.saves = saves
            new = prompt(7_000_000 + 2 * number + saves, tokens)
            began = time.perf_counter()
            ttft_s, tpot_s, _ = await answer(engine, new, DECODED)
            await empty_device(engine)
            stored_s = port.stored_at[engine.hashes(new)[wanted // engine.block_size - 1]] - began
            if number:  # the first round warms up
                for name, seconds in (("ttft_s", ttft_s), ("tpot_s", tpot_s), ("stored_s", stored_s)):
                    found[saves][name].append(seconds)
    return {
        "seconds": {
            "layerwise" if saves else "between steps": {name: spread(each) for name, each in of.items()}
            for saves, of in found.items()
        },
        "ratios": {
            name: spread([a / b for a, b in zip(found[True][name], found[False][name], strict=True)])
            for name in found[True]
        },
    }


def spread(values: Sequence[float]) -> list[float]:
    """Least, median, most."""
    return [min(values), statistics.median(values), max(values)]


async def measure(
    model: str, prefix_tokens: int, rest_tokens: int, shares: Sequence[float], rounds: int
) -> dict[str, Any]:
    """Everything, on one engine."""
    engine = DeviceEngine(model, 3 * (prefix_tokens + rest_tokens) // 32 + 8, SEGMENT_TOKENS, port_type=LinkedPort)
    try:
        loads = [await loading(engine, prefix_tokens, rest_tokens, share, rounds) for share in shares]
        engine.reuse.layerwise.choice.mode = "off"
        saves = await saving(engine, rest_tokens, rounds)
    finally:
        engine.close()
    return {
        "model": model,
        "layers": len(engine.reuse.copier.layers),
        "prefix_tokens": prefix_tokens,
        "rest_tokens": rest_tokens,
        "rounds": rounds,
        "loading": loads,
        "saving": saves,
    }


def table(found: dict[str, Any]) -> str:
    """Markdown."""
    lines = [
        f"{found['prefix_tokens']} tokens are loaded and {found['rest_tokens']} computed, {found['layers']} layers; "
        f"{found['rounds']} rounds; min / median / max.",
        "",
        "| loading ÷ computing | arm | loaded layerwise | TTFT | ÷ load, then compute |",
        "|---|---|---|---|---|",
    ]
    for load in found["loading"]:
        for arm, of in load["arms"].items():
            share, ttft, ratio = f"{of['layerwise']:.0%}", _ms(of["ttft_s"]), _times(of["ratio"])
            lines.append(f"| {load['load_share']:g} | {arm} | {share} | {ttft} | {ratio} |")
    lines += ["", "| saved | TTFT | per further token | all of the prompt stored |", "|---|---|---|---|"]
    for arm, of in found["saving"]["seconds"].items():
        lines.append(f"| {arm} | {_ms(of['ttft_s'])} | {_ms(of['tpot_s'], 2)} | {_ms(of['stored_s'])} |")
    ratios = found["saving"]["ratios"]
    lines.append(
        f"| layerwise ÷ between steps | {_times(ratios['ttft_s'])} | {_times(ratios['tpot_s'])} "
        f"| {_times(ratios['stored_s'])} |"
    )
    return "\n".join(lines)


def _ms(seconds: Sequence[float], digits: int = 0) -> str:
    return " / ".join(f"{1000 * value:.{digits}f}" for value in seconds) + " ms"


def _times(ratios: Sequence[float]) -> str:
    least, median, most = (f"{ratio:.2f}" for ratio in ratios)
    return f"{least} / **{median}** / {most}"


def main(
    model: Annotated[str, typer.Option(help="A model folder, or a Hugging Face id.")] = DEMO_MODEL,
    prefix_tokens: Annotated[int, typer.Option(min=256, help="Tokens that are loaded.")] = 1792,
    rest_tokens: Annotated[int, typer.Option(min=64, help="Tokens that are computed.")] = 1024,
    shares: Annotated[list[float] | None, typer.Option(help="Loading as a share of computing.")] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each arm has its turn.")] = 12,
    json_file: Annotated[str | None, typer.Option("--json", help="A file, or - for stdout.")] = None,
) -> None:
    """Measure, and print two Markdown tables."""
    found = asyncio.run(measure(model, prefix_tokens, rest_tokens, shares or [0.25, 1.0, 4.0], rounds))
    if json_file != "-":
        print(table(found))
    if json_file:
        report = json.dumps(found, indent=2)
        print(report) if json_file == "-" else Path(json_file).write_text(report)


if __name__ == "__main__":
    start_with_engine_threads("load_tests.micro.layerwise")
    typer.run(main)
