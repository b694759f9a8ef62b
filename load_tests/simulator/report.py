"""Results as data and as a table."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from load_tests.simulator.costs import Costs
from load_tests.simulator.runs import Result
from load_tests.simulator.trace import BLOCK_TOKENS

TIERS = ("device", "cpu", "redis")


def as_data(result: Result, trace: str, costs: Costs) -> dict[str, Any]:
    """Return one result for JSON; docs/tools/simulator.md explains the fields."""
    return {
        **asdict(result.setup),
        "trace": trace,
        **result.figures,
        "costs": asdict(costs),
        "seconds": round(result.seconds, 3),
    }


def print_table(out: Console, rows: Sequence[dict[str, Any]]) -> None:
    """Print the results; columns that would say nothing are left out."""
    first = rows[0]
    routed = any(row["router"] for row in rows)
    tiers = [tier for tier in TIERS if tier == "cpu" or first[f"{tier}_blocks"]]
    if len(tiers) == 1:
        tiers = []
    size = f"{first['requests']:,} requests, {first['blocks']:,} blocks of {BLOCK_TOKENS} tokens"
    titles = ["policy", *["router"] * routed, "capacity", "hit rate", *tiers]
    titles += ["computed M tokens", "moved TB", "TTFT s mean", "p50", "p90", "p99"]
    titles += [*["load CoV", "worst queue"] * routed, "ran s"]
    lines = [_cells(row, tiers) for row in rows]
    table = Table(
        title=f"{escape(first['trace'])}: {size}", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title_justify="left"
    )
    for number, (title, column) in enumerate(zip(titles, zip(*lines, strict=True), strict=True)):
        is_name = number <= routed
        width = max(map(len, (*title.split(), *column)))  # narrow terminals break titles, never numbers
        table.add_column(title, justify="left" if is_name else "right", min_width=width, no_wrap=is_name)
    for cells in lines:
        table.add_row(*map(escape, cells))
    out.print(table)


def _cells(row: dict[str, Any], tiers: Sequence[str]) -> list[str]:
    load = row["load"]
    return [
        row["policy"],
        *([row["router"]] if load else []),
        f"{row['capacity_blocks']:,}",
        f"{row['hit_rate']:.3f}",
        *(f"{row['hit_rate_by_tier'][tier]:.3f}" for tier in tiers),
        f"{row['tokens']['recomputed'] / 1e6:,.1f}",
        f"{sum(row['bytes_moved'].values()) / 1e12:,.2f}",
        *(f"{row['ttft_s'][name]:.2f}" for name in ("mean", "p50", "p90", "p99")),
        *([f"{load['window_cov']:.3f}", f"{load['worst_queue']:,}"] if load else []),
        f"{row['seconds']:.1f}",
    ]
