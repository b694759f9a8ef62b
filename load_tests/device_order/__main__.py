"""`python -m load_tests.device_order`: what each value of `kv.device_policy` keeps; docs/measured/eviction.md.

Each mix is replayed once a seed and size; differences to `lru` are paired by seed. Exit codes: see
`load_tests.measuring.program`.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from load_tests.device_order.devices import ClairvoyantDevice, PoolDevice
from load_tests.device_order.mixes import MIXES, blocks_of, mix
from load_tests.device_order.replay import Found, replay
from load_tests.measuring.interval import mean_interval
from load_tests.measuring.program import JsonFile, conclude, one_sentence, progress_bar
from load_tests.simulator.trace import TraceError, read_trace
from load_tests.simulator.turn_replay import Turn, find_turns

ARMS = ("lru", "hotness", "belady")
SHARES = (0.03, 0.1, 0.3)
"""Sizes of a device, of the different blocks that a mix asks for."""
TRACE_BLOCKS = (500, 1000, 3000, 8000, 20000)


def run(turns: Sequence[Turn], blocks: int) -> dict[str, Found]:
    """Replay one trace on a device of each arm. It gets more blocks where the longest request needs them."""
    blocks = max(blocks, 1 + max(len(turn.left) for turn in turns))
    return {
        arm: replay(turns, ClairvoyantDevice(blocks, turns) if arm == "belady" else PoolDevice(blocks, arm))
        for arm in ARMS
    }


def mixes_table(results: dict[tuple[str, float], list[dict[str, Found]]]) -> str:
    """Return a row for each mix and size: every arm's means, and the difference of `hotness` to `lru` by seed."""
    lines = [f"| mix | device | {' | '.join(ARMS)} | hotness - lru |", "|---|---|" + "---|" * (len(ARMS) + 1)]
    for (name, share), found in results.items():
        for figure in Found._fields:
            if figure == "next_turn_share" and "chat" not in name:
                continue
            values = {arm: [getattr(one[arm], figure) for one in found] for arm in ARMS}
            low, high = mean_interval([a - b for a, b in zip(values["hotness"], values["lru"], strict=True)])
            means = " | ".join(f"{statistics.fmean(values[arm]):.3f}" for arm in ARMS)
            what = "hits" if figure == "hit_share" else "next turns"
            lines.append(f"| {name}, {what} | {share:.0%} | {means} | {low:+.3f} to {high:+.3f} |")
    return "\n".join(lines)


def trace_table(results: dict[int, dict[str, Found]]) -> str:
    """Return a row for each size of a device: hits and next turns of each arm."""
    lines = [f"| blocks | {' | '.join(ARMS)} |", "|---:|" + "---|" * len(ARMS)]
    for blocks, found in results.items():
        cells = " | ".join(f"{found[arm].hit_share:.3f}, {found[arm].next_turn_share:.3f}" for arm in ARMS)
        lines.append(f"| {blocks:,} | {cells} |")
    return "\n".join(lines)


def main(
    trace: Annotated[Path | None, typer.Option(help="A trace in Mooncake's format, JSON lines.")] = None,
    seeds: Annotated[int, typer.Option(min=0, max=1000, help="Traces made of each mix.")] = 20,
    first_seed: Annotated[int, typer.Option(min=0)] = 100,
    json_file: JsonFile = None,
) -> None:
    """Replay a trace, and made-up mixes, on a device of each order, and print what each finds: hits, next turns."""
    with one_sentence(TraceError, ValueError):
        read = find_turns(read_trace(trace)) if trace else []
        results: dict[tuple[str, float], list[dict[str, Found]]] = defaultdict(list)
        with progress_bar() as bar:
            task = bar.add_task("replays", total=seeds * len(MIXES) + (len(TRACE_BLOCKS) if read else 0))
            for name in MIXES:
                for seed in range(first_seed, first_seed + seeds):
                    made = mix(name, seed)
                    turns = find_turns(made)
                    for share in SHARES:
                        results[name, share].append(run(turns, int(blocks_of(made) * share)))
                    bar.advance(task)
            on_trace: dict[int, dict[str, Found]] = {}
            for blocks in TRACE_BLOCKS if read else ():
                on_trace[blocks] = run(read, blocks)
                bar.advance(task)
    tables = [table for found, table in ((on_trace, trace_table(on_trace)), (results, mixes_table(results))) if found]
    rows = [
        {"mix": name, "share": share, "found": [{arm: one[arm]._asdict() for arm in ARMS} for one in found]}
        for (name, share), found in results.items()
    ]
    rows += [
        {"blocks": blocks, "found": {arm: found[arm]._asdict() for arm in ARMS}} for blocks, found in on_trace.items()
    ]
    conclude("\n\n".join(tables), rows, json_file)


if __name__ == "__main__":
    typer.run(main)
