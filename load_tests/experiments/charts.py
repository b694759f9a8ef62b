"""Lines with bars from the least to the most, one line per model or arm."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from load_tests.experiments.experiment import Row

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MARKS = "os^Dv*"


def lines(
    axes: Axes, rows: Sequence[Row], x: str, y: str, by: str = "model", scale: float = 1.0, tail: str = ""
) -> None:
    """`y` times `scale` over `x`, a line for each value of `by`, labelled with it and `tail`.

    Bars stand where the rows have `y`_min and `y`_max.
    """
    for number, label in enumerate(dict.fromkeys(row[by] for row in rows)):
        own = sorted((row for row in rows if row[by] == label and row.get(y) is not None), key=lambda row: row[x])
        if not own:
            continue
        values = [row[y] * scale for row in own]
        bars = None
        if f"{y}_min" in own[0]:
            least, most = ([row[f"{y}_{end}"] * scale for row in own] for end in ("min", "max"))
            bars = [
                [value - low for value, low in zip(values, least, strict=True)],
                [high - value for value, high in zip(values, most, strict=True)],
            ]
        axes.errorbar(
            [row[x] for row in own], values, yerr=bars, capsize=3, label=f"{label}{tail}",
            marker=MARKS[number % len(MARKS)],
        )  # fmt: skip


def finish(axes: Axes, xlabel: str, ylabel: str, xlog: bool = True, ylog: bool = False, title: str = "") -> None:
    """Labels, scales, legend. A logarithmic x is marked in powers of two."""
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
    if xlog:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    if ylog:
        axes.set_yscale("log")
    else:
        axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(fontsize="small")
