"""Tables, and a sentence for each target that is missed."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from configs.model_folder import PROJECT_ROOT
from load_tests.measuring.comparison import COLUMNS, Bound, Comparison
from load_tests.measuring.report import table, wrapped
from load_tests.measuring.spread import Spread
from load_tests.micro.blend.measure import (
    BESIDE_BLEND,
    COLD,
    CONTEXTS,
    PERMUTATIONS,
    FirstTokens,
    Hits,
)
from load_tests.micro.blend.measure import FULL as BASE

PAGE = PROJECT_ROOT / "docs" / "measured" / "blending.md"
WARM_BOUND, COLD_BOUND = Bound(0.33), Bound(1.1)
"""Of the time to the first token over a full prefill's: chunks stored, and none of them."""
GAP_BOUND_S = 0.25
HIT_BOUND = Bound(0.85, at_most=False)


@dataclass
class Results:
    """What was measured; the first two by check layer."""

    first_tokens: dict[int, FirstTokens] = field(default_factory=dict)
    gaps: dict[int, dict[str, list[list[float]]]] = field(default_factory=dict)
    hits: Hits | None = None


def comparisons(results: Results) -> list[Comparison]:
    """Times to the first token, compared with a full prefill of the same round."""
    found = []
    for layer, one in results.first_tokens.items():
        values = {BASE: one.seconds[BASE], **one.seconds}
        warm = {arm: seconds for arm, seconds in values.items() if arm != COLD}
        judged = tuple(arm for arm in warm if arm != BASE)
        found.append(Comparison(f"TTFT, chunks stored, check layer {layer}", "s", BASE, warm, judged, WARM_BOUND))
        cold = {arm: values[arm] for arm in (BASE, COLD)}
        found.append(Comparison(f"TTFT, chunks new, check layer {layer}", "s", BASE, cold, (COLD,), COLD_BOUND))
    return found


def gap_lines(gaps: Mapping[str, Sequence[Sequence[float]]], layer: int) -> list[list[str]]:
    """A line for each thing that ran next to the stream: median gap, and largest gap of each round, in ms."""
    lines = []
    for arm, rounds in gaps.items():
        medians = Spread.of([statistics.median(one) for one in rounds])
        largest = Spread.of([max(one) for one in rounds])
        target = f"≤ {1e3 * GAP_BOUND_S:g} ms" if arm == BESIDE_BLEND else ""
        lines.append([f"{layer}", arm, medians.slashed(".0f", 1e3), largest.slashed(".0f", 1e3), target])
    return lines


def misses(results: Results) -> list[str]:
    """A sentence for each target that was missed."""
    said = [sentence for one in comparisons(results) for sentence in one.misses()]
    for layer, gaps in results.gaps.items():
        largest = statistics.median(max(one) for one in gaps[BESIDE_BLEND])
        if largest > GAP_BOUND_S:
            said.append(
                f"Missed: a neighbour's largest gap with a blend, check layer {layer}: {1e3 * largest:.0f} ms; "
                f"the target is at most {1e3 * GAP_BOUND_S:g} ms."
            )
    if results.hits is not None and not HIT_BOUND.holds(results.hits.rate):
        said.append(f"Missed: hit rate {results.hits.rate:.3f}; the target is {HIT_BOUND.in_words}.")
    return said


def markdown(results: Results, setting: Sequence[str]) -> str:
    """The whole: what it was measured with, the tables, and the misses."""
    said = ". ".join([*setting, "Least / median / most of the rounds; ratios are of one round"])
    parts = [wrapped(f"*{said}.*")]
    if results.first_tokens:
        parts.append(table(COLUMNS, [line for one in comparisons(results) for line in one.lines()]))
        parts.append(
            "Blended tokens, of all prompt tokens: "
            + "; ".join(
                f"check layer {layer}, {arm}: {100 * one.blended_share(arm).median:.0f} %"
                for layer, one in results.first_tokens.items()
                for arm in one.seconds
                if arm not in (BASE, COLD)
            )
            + "."
        )
    if results.gaps:
        head = ("check layer", "a neighbour's stream", "gap between tokens, ms", "largest gap, ms", "target")
        parts.append(table(head, [line for layer, gaps in results.gaps.items() for line in gap_lines(gaps, layer)]))
    if results.hits is not None:
        parts.append(wrapped(_hits(results.hits)))
    return "\n\n".join([*parts, *(misses(results) or ["All targets are reached."])])


def _hits(found: Hits) -> str:
    own = "" if found.of_chunks is None else f" The server's own rate, of chunks, is {100 * found.of_chunks:.1f} %."
    return (
        f"Hit rate, {CONTEXTS} contexts in {PERMUTATIONS} orders: {100 * found.rate:.1f} % of {found.prompt_tokens:,} "
        f"prompt tokens; target {HIT_BOUND}. The first prompt counts as cold; the last one finds "
        f"{100 * found.by_prompt[-1]:.0f} %.{own}"
    )


def as_json(results: Results, setting: Sequence[str]) -> dict[str, Any]:
    """Every value."""
    return {
        "setting": list(setting),
        "comparisons": [one.as_dict() for one in comparisons(results)],
        "asked": {
            str(layer): {
                arm: [
                    {"ttft_s": asked.ttft_s, "prompt_tokens": asked.prompt_tokens, "kv_cache": asked.kv_cache}
                    for asked in own
                ]
                for arm, own in one.asked.items()
            }
            for layer, one in results.first_tokens.items()
        },
        "gaps_s": {str(layer): gaps for layer, gaps in results.gaps.items()},
        "hits": asdict(results.hits) | {"rate": results.hits.rate} if results.hits else None,
        "misses": misses(results),
    }
