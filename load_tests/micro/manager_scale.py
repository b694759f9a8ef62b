"""How the manager grows with its index, and how it comes back: `python -m load_tests.micro.manager_scale`.

Two parts in one call: the core alone (`index_scale.py`), and a manager that is killed and rebuilt
(`manager_rebuild.py`).
docs/measured/scale.md says what follows from the numbers.
"""

from __future__ import annotations

import concurrent.futures
import multiprocessing
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated

import typer

from load_tests.harness.tiers import own_ray
from load_tests.measuring import report
from load_tests.measuring.program import JsonFile, conclude, out
from load_tests.micro import index_scale, manager_rebuild
from load_tests.micro.index_scale import CoreScale
from load_tests.micro.manager_rebuild import Rebuild

SIZES = "10000,100000,1000000"
TARGETS = {
    "plan_p50_ms": 0.3,
    "plan_p99_ms": 1.0,
    "evict_ms": 5.0,
    "bytes_per_segment": 500.0 + 32 * index_scale.SEGMENT_BLOCKS,
}
"""Of the core, with a million segments."""
REBUILD_TARGET_S = 5.0


def measure_core(sizes: Sequence[int]) -> list[CoreScale]:
    """Each size in a process of its own."""
    rows = []
    for size in sizes:
        out.print(f"{size} segments: the core")
        fresh = multiprocessing.get_context("spawn")
        with concurrent.futures.ProcessPoolExecutor(max_workers=1, mp_context=fresh) as process:
            rows.append(process.submit(index_scale.measure, size).result())
    return rows


CORE = (
    ("plan of 128 segments, p50", "{0.plan_p50_ms:.2f} ms"),
    ("plan of 128 segments, p99", "{0.plan_p99_ms:.2f} ms"),
    ("the same, processor time, p50", "{0.plan_cpu_p50_ms:.2f} ms"),
    ("the same, processor time, p99", "{0.plan_cpu_p99_ms:.2f} ms"),
    ("offer and commit of a segment, p50", "{0.save_p50_ms:.3f} ms"),
    ("eviction of 1,000 segments", "{0.evict_ms:.1f} ms"),
    ("the same, processor time", "{0.evict_cpu_ms:.1f} ms"),
    (f"memory of a segment of {index_scale.SEGMENT_BLOCKS} blocks", "{0.bytes_per_segment:.0f} bytes"),
    ("of which each block", "{0.bytes_per_block:.0f} bytes"),
    ("adopted in a second", "{0.adopted_per_s:,.0f} segments"),
    ("full garbage collection", "{0.collection_ms:.0f} ms"),
)
REBUILDS = {
    "manager killed, segments in": "{0.held_by}",
    "segments": "{0.segments:,}",
    "first plan after": "{0.first_plan_s:.1f} s",
    "full index": "{0.last_full_s:.1f} s",
    "after the first plan": "{0.full_after_first_plan_s:.1f} s",
    "plans meanwhile": "{0.plans} ({0.plans_with_segments} with segments)",
    "no answer": "{0.plans_unanswered}",
    "wrong": "{0.wrong_plans}",
    "p50 / worst": "{0.plan_p50_ms:.0f} / {0.plan_worst_ms:.0f} ms",
}


def core_table(rows: Sequence[CoreScale]) -> str:
    """A column for each size, and what the last is to the first."""
    head = ["the core, by segments indexed", *(f"{row.segments:,}" for row in rows), "growth"]
    body = []
    for name, form in CORE:
        attribute = form.partition(".")[2].partition(":")[0]
        growth = getattr(rows[-1], attribute) / getattr(rows[0], attribute)
        body.append([name, *map(form.format, rows), f"{growth:.2f}x"])
    return report.table(head, body)


def missed(core: Sequence[CoreScale], rebuilds: Sequence[Rebuild]) -> list[str]:
    """What falls short of the targets, in words; of the core at the largest size."""
    found = []
    if core:
        largest = max(core, key=lambda row: row.segments)
        for name, most in TARGETS.items():
            value = getattr(largest, name)
            if value > most:
                found.append(f"{name} is {value:.2f} with {largest.segments:,} segments, more than {most:g}")
    for row in rebuilds:
        if row.wrong_plans:
            found.append(f"{row.wrong_plans} wrong plans while the index was rebuilt from {row.held_by}")
        if row.full_after_first_plan_s > REBUILD_TARGET_S:
            found.append(f"{row.full_after_first_plan_s:.1f} s to rebuild {row.segments:,} segments from {row.held_by}")
    return found


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
    json_file: JsonFile = None,
) -> None:
    """Measure, and print tables in Markdown; takes some minutes, most of them to fill indexes."""
    sizes = _sizes(segments)
    core = measure_core(sizes)
    rebuilds: list[Rebuild] = []
    if rebuild:
        with own_ray():
            rebuilds += manager_rebuild.measure(rebuild)
    falls_short = missed(core, rebuilds)
    tables = [core_table(core), report.rows(REBUILDS, rebuilds) if rebuilds else ""]
    made = {
        "core": [asdict(row) for row in core],
        "rebuilds": [asdict(row) for row in rebuilds],
        "falls_short": falls_short,
    }
    conclude("\n\n".join(filter(None, tables)), made, json_file, falls_short)


if __name__ == "__main__":
    typer.run(main)
