"""The rows as a table for people and as JSON."""

import dataclasses
import statistics
from collections.abc import Sequence
from typing import Any

import numba  # type: ignore[import-untyped]
import torch
from llvmlite import binding  # type: ignore[import-untyped]
from rich.table import Table

from kernels.benchmark.measuring import Row, Target


def table(rows: Sequence[Row]) -> Table:
    """Medians, with the lowest and the highest in brackets. The copy is memcpy, on a GPU the device's own."""
    drawn = Table("kernel", title="median (lowest-highest)")
    for column in ("rate", "copy, GB/s", "of the copy", "µs a call", "must reach"):
        drawn.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        drawn.add_row(
            row.name,
            f"{_spread(row.rates)} {row.unit}",
            _spread(row.copy_gb_per_s),
            _spread(row.ratios),
            f"{row.microseconds_per_call:.1f}",
            f"{_must_reach(row)}{': missed' if row.missed else ''}",
        )
    return drawn


def as_dict(rows: Sequence[Row]) -> dict[str, Any]:
    """Everything measured, and on what."""
    return {
        "torch": torch.__version__,
        "numba": numba.__version__,
        "cpu": binding.get_host_cpu_name(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "rows": [{**dataclasses.asdict(row), "missed": row.missed} for row in rows],
        "missed": [row.missed for row in rows if row.missed],
    }


def _must_reach(row: Row) -> str:
    match row.target:
        case Target("rate", least):
            return f"{least:g} {row.unit}"
        case Target("ratio", least):
            return f"{least:g} of memcpy"
        case _:
            return "-"


def _spread(values: Sequence[float]) -> str:
    digits = 0 if max(values) >= 100 else 2
    low, middle, high = (f"{value:.{digits}f}" for value in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low}-{high})"
