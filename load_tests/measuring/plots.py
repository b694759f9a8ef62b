"""Plots without a screen: lines with bars from the least to the most, and bars by group. Imports matplotlib late."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from load_tests.measuring.spread import Spread

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MARKS = "os^Dv*"
GROUP_WIDTH = 0.8
"""Of the bars of one group together; the next group begins at 1."""


def new_figure(width_in: float = 10.0, height_in: float = 4.5) -> Figure:
    """An empty figure that `save` can write."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def save(figure: Figure, path: Path | str, dpi: int = 100) -> None:
    """As a PNG. Raises OSError."""
    figure.savefig(path, dpi=dpi, format="png")


def lines(
    axes: Axes,
    rows: Sequence[Mapping[str, Any]],
    x: str,
    y: str,
    by: str = "model",
    scale: float = 1.0,
    tail: str = "",
) -> None:
    """`y` times `scale` over `x`, a line for each value of `by`, labelled with it and `tail`.

    Bars stand where the rows have `y`_min and `y`_max (`Spread.as_row`).
    """
    for number, label in enumerate(dict.fromkeys(row[by] for row in rows)):
        own = sorted((row for row in rows if row[by] == label and row.get(y) is not None), key=lambda row: row[x])
        if not own:
            continue
        spreads = [Spread(*(scale * row.get(f"{y}{end}", row[y]) for end in ("_min", "", "_max"))) for row in own]
        axes.errorbar(
            [row[x] for row in own],
            [spread.median for spread in spreads],
            yerr=whiskers(spreads) if f"{y}_min" in own[0] else None,
            capsize=3,
            label=f"{label}{tail}",
            marker=MARKS[number % len(MARKS)],
        )


def bars(axes: Axes, groups: Sequence[str], arms: Mapping[str, Sequence[Spread | None]]) -> None:
    """Draw for each group a bar for each arm, side by side; None: nothing was measured."""
    width = GROUP_WIDTH / len(arms)
    for number, (arm, spreads) in enumerate(arms.items()):
        known = [(place, spread) for place, spread in enumerate(spreads) if spread is not None]
        shift = (number - (len(arms) - 1) / 2) * width
        found = [spread for _, spread in known]
        axes.bar(
            [place + shift for place, _ in known],
            [spread.median for spread in found],
            width,
            yerr=whiskers(found),
            capsize=2,
            label=arm,
        )
    axes.set_xticks(range(len(groups)), list(groups))


def whiskers(spreads: Sequence[Spread]) -> list[list[float]]:
    """Below and above the medians, as matplotlib's `yerr`."""
    return [[one.median - one.least for one in spreads], [one.most - one.median for one in spreads]]


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
