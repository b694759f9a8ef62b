"""Hit rate over capacity, a line per policy (and router); the clairvoyant bound and LRU stand out."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from load_tests.simulator.trace import BLOCK_TOKENS

_MARKED = {
    "belady": {"color": "black", "linestyle": "--", "label": "belady (knows the future)"},
    "lru": {"color": "0.55", "linestyle": "-.", "label": "lru"},
}


def plot_formats() -> set[str]:
    """Return the file name endings that can be written, without the dot."""
    from matplotlib.figure import Figure  # here and below: takes a second, so only with --plot

    return set(Figure().canvas.get_supported_filetypes())


def plot(rows: Sequence[dict[str, Any]], file: Path) -> None:
    """Write the figure. Raises OSError."""
    from matplotlib.figure import Figure

    lines: dict[tuple[str, str | None], list[tuple[int, float]]] = {}
    for row in rows:
        lines.setdefault((row["policy"], row["router"]), []).append((row["capacity_blocks"], row["hit_rate"]))
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.add_subplot()
    for (policy, router), points in lines.items():
        label = policy if router is None else f"{policy}, {router}"
        style: dict[str, Any] = {"label": label, **(_MARKED.get(policy, {}) if router is None else {})}
        axes.plot(*zip(*sorted(points), strict=True), marker="o", markersize=4, **style)
    axes.set(xlabel=f"capacity, blocks of {BLOCK_TOKENS} tokens", ylabel="leading blocks found ÷ all blocks")
    axes.set_title(f"{Path(rows[0]['trace']).name}, {rows[0]['requests']:,} requests")
    axes.set_xscale("log")
    sizes = sorted({row["capacity_blocks"] for row in rows})
    axes.set_xticks(sizes, [f"{size:,}" for size in sizes], minor=False)
    axes.set_xticks([], minor=True)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(file, dpi=150)
