"""What was found, as tables and as JSON: ratios to `fcfs` of the same seed, and what they should be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from load_tests.measuring.comparison import COLUMNS, Bound, Comparison
from load_tests.measuring.program import Block
from load_tests.measuring.report import table
from load_tests.measuring.spread import Spread
from load_tests.scheduling.gaps import Gaps
from load_tests.scheduling.mixed import Run
from load_tests.scheduling.servers import FCFS, MLFQ, SHORTEST

PAGE = Path("docs/measured/scheduling.md")
BLOCK = Block(PAGE, "<!-- scheduling: begin -->", "<!-- scheduling: end -->")
MOST_RECOMPUTED = 0.05
MOST_GAP, MOST_TTFT = 1.15, 1.4

_QUESTIONS: Sequence[tuple[str, str, str, Mapping[str, Bound]]] = (
    ("mean completion", "mean_s", "s", {MLFQ: Bound(0.65), SHORTEST: Bound(0.65)}),
    ("short jobs, p95", "short_p95_s", "s", {MLFQ: Bound(0.5), SHORTEST: Bound(0.25)}),
    ("longest job", "long_max_s", "s", {MLFQ: Bound(2.2), SHORTEST: Bound(2.2)}),
    ("answer tokens", "tokens_per_s", "/s", {MLFQ: Bound(0.85, False), SHORTEST: Bound(0.85, False)}),
    ("p95 of all", "p95_s", "s", {}),
)


def comparisons(runs: Mapping[str, Sequence[Run]]) -> list[Comparison]:
    """One for each question and bound; arms that were not measured are left out."""
    found = []
    for title, field, unit, bounds in _QUESTIONS:
        values = {arm: [getattr(run, field) for run in mine] for arm, mine in runs.items()}
        by_bound: dict[Bound | None, list[str]] = {}
        for arm in runs:
            if arm != FCFS:
                by_bound.setdefault(bounds.get(arm), []).append(arm)
        for bound, arms in by_bound.items():
            kept = {arm: values[arm] for arm in (FCFS, *arms)}
            found.append(Comparison(title, unit, FCFS, kept, tuple(arms) if bound else (), bound))
    return found


def policy_table(runs: Mapping[str, Sequence[Run]]) -> str:
    """The ratios."""
    lines: list[Sequence[str]] = []
    for comparison in comparisons(runs):
        lines += [line for line in comparison.lines() if line not in lines]
    return table(COLUMNS, lines)


def kept_table(found: Mapping[str, Mapping[str, float]], wrong: Mapping[str, tuple[int, int]]) -> str:
    """What preemption cost: by arm, counted by the server, and answers compared."""
    body = []
    for arm, counts in found.items():
        kept, again = (counts.get(f"crosskv_preempted_tokens_total.{one}", 0.0) for one in ("kept", "recomputed"))
        share = again / (kept + again) if kept + again else 0.0
        preempted = counts.get("crosskv_preemptions_total.policy", 0.0)
        by_memory = counts.get("crosskv_preemptions_total.memory", 0.0)
        body.append(
            [arm, f"{preempted:.0f} + {by_memory:.0f}", f"{kept + again:.0f}", f"{share:.1%}",
             f"{wrong[arm][0]} of {wrong[arm][1]}", f"{counts.get('crosskv_scheduler_fallbacks_total', 0.0):.0f}"]
        )  # fmt: skip
    head = ("arm", "preempted (policy + memory)", "tokens that came back", "recomputed", "wrong answers", "fallbacks")
    return table(head, body)


def gap_table(target_s: float, without: Sequence[Gaps], held: Sequence[Gaps]) -> str:
    """Gaps between tokens, by arm, and against the target."""
    ms = 1e3
    body = []
    for arm, found in (("without", without), (f"target {target_s * ms:.1f} ms", held)):
        body.append(
            [arm, *(Spread.of([getattr(one, name) for one in found]).bracketed(".1f", ms)
                    for name in ("quiet_p50_s", "p50_s", "p99_s", "most_s")),
             Spread.of([one.ttft_s for one in found]).bracketed(".0f", ms)]
        )  # fmt: skip
    body.append(
        ["ratio", "", "", Spread.of([one.p99_s / target_s for one in held]).bracketed(".2f") + " of the target", "",
         Spread.of(_ttft(without, held)).bracketed(".2f")]
    )  # fmt: skip
    return table(("arm", "gap alone, p50, ms", "gap, p50", "gap, p99", "gap, most", "first token, ms"), body)


def _ttft(without: Sequence[Gaps], held: Sequence[Gaps]) -> list[float]:
    return [mine.ttft_s / theirs.ttft_s for mine, theirs in zip(held, without, strict=True)]


def misses(
    runs: Mapping[str, Sequence[Run]], counts: Mapping[str, Mapping[str, float]], wrong: Mapping[str, tuple[int, int]],
    target_s: float | None, without: Sequence[Gaps], held: Sequence[Gaps],
) -> list[str]:  # fmt: skip
    """A sentence for each target that was not met."""
    said = [miss for comparison in comparisons(runs) for miss in comparison.misses()]
    for arm, found in counts.items():
        kept, again = (found.get(f"crosskv_preempted_tokens_total.{one}", 0.0) for one in ("kept", "recomputed"))
        if kept + again and again / (kept + again) > MOST_RECOMPUTED:
            share = again / (kept + again)
            said.append(f"Missed: {arm} recomputed {share:.1%} of what came back; the target is {MOST_RECOMPUTED:.0%}.")
        if wrong[arm][0]:
            said.append(f"Missed: {wrong[arm][0]} of {wrong[arm][1]} answers of {arm} are not the undisturbed ones.")
    if target_s is not None and held:
        gap = Spread.of([one.p99_s / target_s for one in held]).median
        if gap > MOST_GAP:
            said.append(f"Missed: the 99th percentile of gaps is {gap:.2f} of the target; it should be {MOST_GAP}.")
        ttft = Spread.of(_ttft(without, held)).median
        if ttft > MOST_TTFT:
            said.append(f"Missed: first tokens take {ttft:.2f} times as long; it should be {MOST_TTFT}.")
    return said


def as_json(
    runs: Mapping[str, Sequence[Run]], counts: Mapping[str, Mapping[str, float]], wrong: Mapping[str, tuple[int, int]],
    target_s: float | None, without: Sequence[Gaps], held: Sequence[Gaps], said: Sequence[str], machine: str,
) -> dict[str, Any]:  # fmt: skip
    """All of it."""
    return {
        "machine": machine,
        "runs": {arm: [run.as_dict() for run in mine] for arm, mine in runs.items()},
        "comparisons": [comparison.as_dict() for comparison in comparisons(runs)],
        "counted": {arm: dict(found) for arm, found in counts.items()},
        "wrong": {arm: list(found) for arm, found in wrong.items()},
        "target_s": target_s,
        "without_target": [asdict(one) for one in without],
        "with_target": [asdict(one) for one in held],
        "misses": list(said),
    }
