"""Pictures of a run: one figure per quantity and model, a panel per workload, bars by size of the working set."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from load_tests.bench.summary import FIGURES, Row, Spread

PLOTTED = {
    "ttft_returning_s": "seconds",
    "ttft_s": "seconds",
    "output_tokens_per_s": "tokens/s",
    "recomputed_share": "share",
}
_WIDTH_IN, _HEIGHT_IN = 4.0, 3.2


def draw(found: Sequence[Row], folder: Path, prefix: str) -> list[Path]:
    """Write the pictures; whiskers are least and most of the alternations. Returns their paths."""
    import matplotlib

    matplotlib.use("agg")
    paths = []
    for model in dict.fromkeys(row.model for row in found):
        for figure, unit in PLOTTED.items():
            path = folder / f"{prefix}-{model}-{figure.replace('_', '-')}.png"
            _draw(found, model, figure, unit, path)
            paths.append(path)
    return paths


def _draw(found: Sequence[Row], model: str, figure: str, unit: str, path: Path) -> None:
    from matplotlib import pyplot

    workloads = list(dict.fromkeys(row.workload for row in found if row.model == model))
    arms = list(dict.fromkeys(row.arm for row in found if row.model == model))
    picture, panels = pyplot.subplots(
        1, len(workloads), figsize=(_WIDTH_IN * len(workloads), _HEIGHT_IN), squeeze=False, layout="constrained"
    )
    for panel, workload in zip(panels[0], workloads, strict=True):
        chosen = [row for row in found if (row.model, row.workload) == (model, workload)]
        _panel(panel, chosen, arms, figure)
        panel.set_title(workload)
        panel.set_xlabel("working set / device pools")
    panels[0][0].set_ylabel(unit)
    panels[0][0].legend(fontsize="small")
    picture.suptitle(f"{FIGURES[figure][0]}, {model}")
    picture.savefig(path, dpi=120)
    pyplot.close(picture)


def _panel(panel: Any, chosen: Sequence[Row], arms: Sequence[str], figure: str) -> None:
    sizes = sorted({row.working_set for row in chosen})
    values = {(row.arm, row.working_set): row.values[figure] for row in chosen}
    width = 0.8 / len(arms)
    for number, arm in enumerate(arms):
        known = [(place, spread) for place, size in enumerate(sizes) if (spread := values.get((arm, size)))]
        places = [place + (number - (len(arms) - 1) / 2) * width for place, _ in known]
        spreads: list[Spread] = [spread for _, spread in known]
        medians = [spread.median for spread in spreads]
        whiskers = [[s.median - s.least for s in spreads], [s.most - s.median for s in spreads]]
        panel.bar(places, medians, width, yerr=whiskers, capsize=2, label=arm)
    panel.set_xticks(range(len(sizes)), [f"{size:g} x" for size in sizes])
