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
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal, TypeAlias

import typer
from rich.progress import track

from configs.model_folder import DEMO_MODEL
from configs.settings import load_settings
from deployments.protocol.kv_port import LayerArrival, SaveGrant
from kvmanager.moves.plan import PlannedLoad
from kvmanager.segments.format import read_header
from kvmanager.segments.spans import SegmentSpan
from load_tests.harness.engine import Engine, Timed, prompt, start_with_engine_threads
from load_tests.harness.memory_port import BrainPort
from load_tests.measuring import report
from load_tests.measuring.comparison import Comparison
from load_tests.measuring.program import JsonFile, Rounds, out
from load_tests.measuring.spread import Spread
from load_tests.measuring.turns import turns

Mode: TypeAlias = Literal["on", "off", "auto"]
ARMS: dict[str, Mode] = {"layerwise": "on", "load, then compute": "off", "as the scheduler chooses": "auto"}
BASE = "load, then compute"
SAVES = {"layerwise": True, "between steps": False}
SAVING_TIMES = ("ttft_s", "tpot_s", "stored_s")
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
        due = time.monotonic()
        for start, end in zip((0, *group_ends), group_ends, strict=False):
            for number, (sealed, buffer) in enumerate(zip(stored, buffers, strict=True)):
                body = read_header(sealed).body_offset
                layer_bytes = (len(sealed) - body) // layers
                first, last = body + start * layer_bytes if start else 0, body + end * layer_bytes
                due = self._pace(due, last - first)
                buffer[first:last] = sealed[first:last]
                yield LayerArrival(number, buffer.toreadonly(), end)
        if len(stored) < len(loads):
            yield LayerArrival(len(stored), None, 0)

    def _pace(self, due: float, nbytes: int) -> float:
        """Sleep until `nbytes` more have come; return when the link is free again."""
        due += nbytes / self.bytes_per_s
        time.sleep(max(0.0, due - time.monotonic()))
        return due


class LinkedEngine(Engine):
    """An engine behind such a port."""

    def __init__(self, model: str, device_blocks: int) -> None:
        engine = {"device_blocks": device_blocks, "max_num_seqs": 16, "log_stats": False}
        kv = {"segment_tokens": SEGMENT_TOKENS, "load_deadline_s": 30.0}
        settings = load_settings({"model": model, "engine": engine, "kv": kv})
        super().__init__(settings, LinkedPort(settings.blocks_per_segment))

    async def answer(self, tokens: Sequence[int], max_tokens: int = 1) -> Timed:
        """One prompt's times and usage."""
        return await self.serve([tokens], max_tokens)


async def loading(
    engine: LinkedEngine, prefix_tokens: int, rest_tokens: int, share: float, rounds: int
) -> dict[str, Any]:
    """One share of loading to computing; all arms in each round."""
    port: Any = engine.port
    choice = engine.reuse.layerwise.choice
    prefix = prompt(1, prefix_tokens)
    seeds = iter(range(int(share * 1000) * 100_000 + 1, 10**9))
    port.bytes_per_s = float("inf")
    await engine.answer(prefix)
    computed = []
    for _ in range(3):  # the beginning is on the device
        found = await engine.answer(prefix + prompt(next(seeds), rest_tokens))
        assert found.usage["device"] >= prefix_tokens - SEGMENT_TOKENS, found.usage
        computed.append(found.ttft_s)
    compute_s = statistics.median(computed)
    kv_bytes = engine.reuse.copier.block_bytes * (prefix_tokens // engine.block_tokens)
    port.bytes_per_s = kv_bytes / (share * compute_s)
    ttft: dict[str, list[float]] = {arm: [] for arm in ARMS}
    layerwise: dict[str, int] = dict.fromkeys(ARMS, 0)
    choice.mode = "off"
    for _ in range(WARM_UP):
        await engine.empty_device()
        await engine.answer(prefix + prompt(next(seeds), rest_tokens))
    for turn in track(list(turns(list(ARMS), rounds)), f"loading takes {share:g} of computing", console=out):
        await engine.empty_device()
        choice.mode = ARMS[turn.arm]
        loads = engine.reuse.transfer.counters.loads_layerwise
        found = await engine.answer(prefix + prompt(next(seeds), rest_tokens))
        assert found.usage["cpu"] >= prefix_tokens - SEGMENT_TOKENS, found.usage
        ttft[turn.arm].append(found.ttft_s)
        layerwise[turn.arm] += engine.reuse.transfer.counters.loads_layerwise - loads
    compared = Comparison("TTFT", "s", BASE, ttft)
    return {
        "load_share": share,
        "compute_s": compute_s,
        "bytes_per_s": port.bytes_per_s,
        "arms": {
            arm: {
                "ttft_s": compared.spread(arm).as_list(),
                "ratio": compared.ratio(arm).as_list(),
                "layerwise": layerwise[arm] / rounds,
            }
            for arm in ttft
        },
    }


async def saving(engine: LinkedEngine, tokens: int, rounds: int) -> dict[str, Any]:
    """Saved under the computation, against saved between steps."""
    port: Any = engine.port
    port.bytes_per_s = float("inf")
    wanted = tokens // engine.block_tokens * engine.block_tokens
    seeds = itertools.count(7_000_000)
    found: dict[str, dict[str, list[float]]] = {name: {arm: [] for arm in SAVES} for name in SAVING_TIMES}
    for turn in track(list(turns(list(SAVES), rounds, warm_up=1)), "saving", console=out):
        await engine.empty_device()
        engine.reuse.layerwise.saves = SAVES[turn.arm]
        new = prompt(next(seeds), tokens)
        began = time.perf_counter()
        answered = await engine.answer(new, DECODED)
        await engine.empty_device()
        stored_s = port.stored_at[engine.hashes(new)[wanted // engine.block_tokens - 1]] - began
        if turn.counts:
            for name, seconds in zip(SAVING_TIMES, (answered.ttft_s, answered.tpot_s, stored_s), strict=True):
                found[name][turn.arm].append(seconds)
    compared = {name: Comparison(name, "s", "between steps", values) for name, values in found.items()}
    return {
        "seconds": {arm: {name: one.spread(arm).as_list() for name, one in compared.items()} for arm in SAVES},
        "ratios": {name: one.ratio("layerwise").as_list() for name, one in compared.items()},
    }


async def measure(
    model: str, prefix_tokens: int, rest_tokens: int, shares: Sequence[float], rounds: int
) -> dict[str, Any]:
    """Everything, on one engine."""
    engine = LinkedEngine(model, 3 * (prefix_tokens + rest_tokens) // 32 + 8)
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
    title = (
        f"{found['prefix_tokens']} tokens are loaded and {found['rest_tokens']} computed, {found['layers']} layers; "
        f"{found['rounds']} rounds; min / median / max."
    )
    loading = [
        [f"{load['load_share']:g}", arm, f"{of['layerwise']:.0%}", _ms(of["ttft_s"]), _times(of["ratio"])]
        for load in found["loading"]
        for arm, of in load["arms"].items()
    ]
    saving = [
        [arm, _ms(of["ttft_s"]), _ms(of["tpot_s"], ".2f"), _ms(of["stored_s"])]
        for arm, of in found["saving"]["seconds"].items()
    ]
    saving.append(["layerwise ÷ between steps", *(_times(found["saving"]["ratios"][name]) for name in SAVING_TIMES)])
    return "\n\n".join(
        [
            title,
            report.table(["loading ÷ computing", "arm", "loaded layerwise", "TTFT", "÷ load, then compute"], loading),
            report.table(["saved", "TTFT", "per further token", "all of the prompt stored"], saving),
        ]
    )


def _ms(spread: Sequence[float], form: str = ".0f") -> str:
    return Spread(*spread).slashed(form, 1e3) + " ms"


def _times(spread: Sequence[float]) -> str:
    return Spread(*spread).slashed(".2f", bold=True)


def main(
    model: Annotated[str, typer.Option(help="A model folder, or a Hugging Face id.")] = DEMO_MODEL,
    prefix_tokens: Annotated[int, typer.Option(min=256, help="Tokens that are loaded.")] = 1792,
    rest_tokens: Annotated[int, typer.Option(min=64, help="Tokens that are computed.")] = 1024,
    shares: Annotated[list[float] | None, typer.Option(help="Loading as a share of computing.")] = None,
    rounds: Rounds = 12,
    json_file: JsonFile = None,
) -> None:
    """Measure, and print two Markdown tables."""
    found = asyncio.run(measure(model, prefix_tokens, rest_tokens, shares or [0.25, 1.0, 4.0], rounds))
    report.deliver(table(found), found, json_file)


if __name__ == "__main__":
    start_with_engine_threads("load_tests.micro.layerwise")
    typer.run(main)
