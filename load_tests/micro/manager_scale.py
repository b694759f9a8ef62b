"""How the manager grows with its index, and how it comes back: `python -m load_tests.micro.manager_scale`.

Four parts, all in one call: the core alone (`index_scale.py`), plans while something is done to the whole index
(`manager_stalls.py`), the actor under four callers (`manager_calls.py`), and a manager that is killed
and rebuilt (`manager_rebuild.py`). docs/measured/scale.md says what follows from the numbers.
"""

from __future__ import annotations

import concurrent.futures
import json
import multiprocessing
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console

from load_tests.micro import index_scale, manager_calls, manager_rebuild, manager_stalls
from load_tests.micro.index_scale import CoreScale
from load_tests.micro.manager_calls import CallScale, own_ray
from load_tests.micro.manager_rebuild import Rebuild
from load_tests.micro.manager_stalls import Stall

out = Console(stderr=True, highlight=False)
Measured = TypeVar("Measured")
SIZES = "10000,100000,1000000"
TARGETS = {"plan_p50_ms": 0.3, "plan_p99_ms": 1.0, "evict_ms": 5.0, "bytes_per_segment": 500.0}
"""Of the core, with a million segments (issue 4)."""
CALLS_TARGET_PER_S = 2000.0
REBUILD_TARGET_S = 5.0
STALL_TARGET_MS = 50.0
"""Longest wait of a plan, whatever is done to the index (issue 15)."""


def tell(what: str) -> None:
    """Say on stderr what is going on."""
    out.print(what)


def measure_core(sizes: Sequence[int]) -> list[CoreScale]:
    """Each size in a process of its own."""
    rows = []
    for size in sizes:
        tell(f"{size} segments: the core")
        rows.append(_in_fresh_process(index_scale.measure, size))
    return rows


def measure_stalls(size: int) -> list[Stall]:
    """In a process of its own."""
    tell(f"{size} segments: plans while something is done to all of them")
    return _in_fresh_process(manager_stalls.measure, size)


def _in_fresh_process(measure: Callable[[int], Measured], size: int) -> Measured:
    fresh = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(max_workers=1, mp_context=fresh) as process:
        return process.submit(measure, size).result()


def core_table(rows: Sequence[CoreScale]) -> str:
    """A column for each size, and what the last is to the first."""
    lines = {
        "plan of 128 segments, p50": ("plan_p50_ms", "{:.2f} ms"),
        "plan of 128 segments, p99": ("plan_p99_ms", "{:.2f} ms"),
        "the same, processor time, p50": ("plan_cpu_p50_ms", "{:.2f} ms"),
        "the same, processor time, p99": ("plan_cpu_p99_ms", "{:.2f} ms"),
        "offer and commit of a segment, p50": ("save_p50_ms", "{:.3f} ms"),
        "eviction of 1,000 segments": ("evict_ms", "{:.1f} ms"),
        "the same, processor time": ("evict_cpu_ms", "{:.1f} ms"),
        "memory of a segment": ("bytes_per_segment", "{:.0f} bytes"),
        "adopted in a second": ("adopted_per_s", "{:,.0f} segments"),
        "full garbage collection": ("collection_ms", "{:.0f} ms"),
    }
    head = ["the core, by segments indexed", *(f"{row.segments:,}" for row in rows), "growth"]
    body = []
    for name, (attribute, form) in lines.items():
        values = [getattr(row, attribute) for row in rows]
        body.append([name, *(form.format(value) for value in values), f"{values[-1] / values[0]:.2f}x"])
    return markdown(head, body)


def stalls_table(rows: Sequence[Stall]) -> str:
    """One line for each thing that is done."""
    head = ["meanwhile", "segments", "done in", "plans", "a plan waits, p50", "worst", "worst, processor time"]
    body = [
        [
            row.what,
            f"{row.segments:,}",
            f"{row.took_s:.1f} s",
            str(row.plans),
            f"{row.p50_ms:.1f} ms",
            f"{row.worst_ms:.0f} ms",
            f"{row.worst_cpu_ms:.0f} ms",
        ]
        for row in rows
    ]
    return markdown(head, body)


def calls_table(rows: Sequence[CallScale]) -> str:
    """Sent together against each alone, for every kind of load; ratios are of one round's two."""
    head = ["plan+commits a second, 4 callers", "segments indexed", "together", "alone", "ratio", "plan p50 / p99"]
    body = []
    for together, alone in zip(rows[::2], rows[1::2], strict=True):
        ratios = [a / b for a, b in zip(together.rates, alone.rates, strict=True)]
        times = [index_scale.quantile(together.latencies, share) * 1e3 for share in (0.5, 0.99)]
        body.append(
            [
                f"prompts of {together.prompt_segments} segments, {together.under_way} under way at each",
                f"{together.segments:,}",
                _spread(together.rates, "{:,.0f}"),
                _spread(alone.rates, "{:,.0f}"),
                _spread(ratios, "{:.1f}"),
                f"{times[0]:.1f} / {times[1]:.1f} ms",
            ]
        )
    return markdown(head, body)


def rebuild_table(rows: Sequence[Rebuild]) -> str:
    """One line for each kill."""
    head = [
        "manager killed, segments in", "segments", "first plan after", "full index", "after the first plan",
        "plans meanwhile", "no answer", "wrong", "p50 / worst",
    ]  # fmt: skip
    body = [
        [
            row.held_by,
            f"{row.segments:,}",
            f"{row.first_plan_s:.1f} s",
            f"{max(row.full_s.values(), default=float('inf')):.1f} s",
            f"{row.full_after_first_plan_s:.1f} s",
            f"{row.plans} ({row.plans_with_segments} with segments)",
            str(row.plans_unanswered),
            str(row.wrong_plans),
            f"{row.plan_p50_ms:.0f} / {row.plan_worst_ms:.0f} ms",
        ]
        for row in rows
    ]
    return markdown(head, body)


def markdown(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """A table."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def missed(
    core: Sequence[CoreScale],
    calls: Sequence[CallScale],
    rebuilds: Sequence[Rebuild],
    stalls: Sequence[Stall] = (),
) -> list[str]:
    """What falls short of the targets, in words; of the core and the actor at the largest size."""
    found = [
        f"a plan waited {row.worst_ms:.0f} ms during: {row.what}, {row.segments:,} segments"
        for row in stalls
        if row.worst_ms > STALL_TARGET_MS
    ]
    if core:
        largest = max(core, key=lambda row: row.segments)
        for name, most in TARGETS.items():
            value = getattr(largest, name)
            if value > most:
                found.append(f"{name} is {value:.2f} with {largest.segments:,} segments, more than {most:g}")
    if calls:
        size = max(row.segments for row in calls)
        best = max(statistics.median(row.rates) for row in calls if row.segments == size)
        if best < CALLS_TARGET_PER_S:
            found.append(f"{best:,.0f} plan+commits a second with {size:,} segments, fewer than {CALLS_TARGET_PER_S:g}")
    for row in rebuilds:
        if row.wrong_plans:
            found.append(f"{row.wrong_plans} wrong plans while the index was rebuilt from {row.held_by}")
        if row.full_after_first_plan_s > REBUILD_TARGET_S:
            found.append(f"{row.full_after_first_plan_s:.1f} s to rebuild {row.segments:,} segments from {row.held_by}")
    return found


def _spread(values: Sequence[float], form: str) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{form.format(middle)} ({form.format(low)}-{form.format(high)})"


def _sizes(text: str) -> list[int]:
    try:
        sizes = sorted({int(part) for part in text.split(",")})
    except ValueError:
        sizes = []
    if not sizes or sizes[0] < 10_000:
        raise typer.BadParameter(f"sizes are whole numbers from 10000 on, separated by commas, got {text!r}")
    return sizes


def main(
    segments: Annotated[str, typer.Option(help="Sizes of the index, separated by commas.")] = SIZES,
    rebuild: Annotated[int, typer.Option(min=0, help="Segments of the rebuilt index; 0: not measured.")] = 100_000,
    stalls: Annotated[int, typer.Option(min=0, help="Segments to clear, lose and tell; 0: not measured.")] = 1_000_000,
    rounds: Annotated[int, typer.Option(min=0, help="Rounds of calls at the actor; 0: not measured.")] = 3,
    json_file: Annotated[str | None, typer.Option("--json", help="A file, or - for stdout.")] = None,
) -> None:
    """Measure, and print tables in Markdown; takes some minutes, most of them to fill indexes."""
    sizes = _sizes(segments)
    core = measure_core(sizes)
    waits = measure_stalls(stalls) if stalls else []
    calls: list[CallScale] = []
    rebuilds: list[Rebuild] = []
    with own_ray():
        for size in sizes if rounds else ():
            calls += manager_calls.measure(size, rounds, tell)
        if rebuild:
            rebuilds += manager_rebuild.measure(rebuild, tell)
    falls_short = missed(core, calls, rebuilds, waits)
    if json_file != "-":
        tables = [
            core_table(core),
            stalls_table(waits) if waits else "",
            calls_table(calls) if calls else "",
            rebuild_table(rebuilds) if rebuilds else "",
        ]
        print("\n\n".join(filter(None, tables)))
    for sentence in falls_short:
        out.print(f"falls short: {sentence}")
    if json_file:
        report: dict[str, Any] = {
            "core": [asdict(row) for row in core],
            "stalls": [asdict(row) for row in waits],
            "calls": [row.as_dict() for row in calls],
            "rebuilds": [row.as_dict() for row in rebuilds],
            "falls_short": falls_short,
        }
        text = json.dumps(report, indent=2)
        print(text) if json_file == "-" else Path(json_file).write_text(text)


if __name__ == "__main__":
    typer.run(main)
