"""Tables, JSON, and a sentence for each target that is missed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from load_tests.measuring.comparison import COLUMNS, Bound, Comparison
from load_tests.measuring.report import table, wrapped
from load_tests.measuring.spread import Spread, ratios
from load_tests.micro.sparse_hit.measure import Level

OFF, LAYERS = "off", "layers"
COMPUTED, FROM_REDIS = "computed", "from Redis"
MIB = 1 << 20
MOST_BYTES = Bound(0.5)
"""Of dense KV's in Redis, at level `layers`."""
MOST_LOST = 1
"""Answers, at level `layers`."""

Levels = Mapping[str, Level]


def comparisons(levels: Levels) -> list[Comparison]:
    """First tokens from Redis compared with a prefill on the same server, and with dense KV of the same documents."""
    found = [
        Comparison(
            f"TTFT, kv.sparse: {name}", "s", COMPUTED,
            {COMPUTED: level.values("computed_s"), FROM_REDIS: level.values("hit_s")},
        )
        for name, level in levels.items()
    ]  # fmt: skip
    if OFF in levels and len(levels) > 1:
        hits = {name: level.values("hit_s") for name, level in levels.items()}
        found.append(Comparison("TTFT from Redis, against dense KV", "s", OFF, hits))
    return found


def smaller(levels: Levels, name: str) -> Spread | None:
    """Bytes in Redis divided by dense KV's of the same documents; None where those were not measured."""
    if OFF not in levels:
        return None
    return Spread.of(ratios(levels[name].values("redis_bytes"), levels[OFF].values("redis_bytes")))


def level_lines(levels: Levels, answers_known: bool) -> list[list[str]]:
    """Bytes and answers by level."""
    lines = []
    for name, level in levels.items():
        ratio = smaller(levels, name)
        bytes_ratio = "" if ratio is None else ratio.slashed(".3f", bold=True)
        same = 100 * sum(level.values("same_tokens")) / len(level.rounds)
        right = f"{level.total('right_before')}, {level.total('right_after')}" if answers_known else ""
        lines.append(
            [
                name,
                Spread.of(level.values("redis_bytes")).slashed(".2f", 1 / MIB),
                bytes_ratio,
                f"{level.total('equal')}/{level.total('answers')}",
                f"{same:.0f} %",
                right,
                f"{level.total('lost')}" if answers_known else "",
            ]
        )
    return lines


def misses(levels: Levels) -> list[str]:
    """Of level `layers` alone: the others lose what they lose."""
    if LAYERS not in levels:
        return []
    said = []
    ratio = smaller(levels, LAYERS)
    if ratio is not None and not MOST_BYTES.holds(ratio.median):
        said.append(f"Missed: level {LAYERS} takes {ratio.median:.3f} of dense KV's bytes, not {MOST_BYTES.in_words}.")
    if (lost := levels[LAYERS].total("lost")) > MOST_LOST:
        said.append(f"Missed: level {LAYERS} loses {lost} answers of {levels[LAYERS].total('answers')}.")
    return said


def markdown(levels: Levels, setting: Sequence[str], answers_known: bool) -> str:
    """The whole: what it was measured with, the tables, and the misses."""
    said = ". ".join([*setting, "Least / median / most of the rounds; ratios are of one round"])
    head = ("kv.sparse", "MiB in Redis", "÷ dense", "answers as before", "tokens as before", "right before, after",
            "lost")  # fmt: skip
    parts = [
        wrapped(f"*{said}.*"),
        table(COLUMNS, [line for one in comparisons(levels) for line in one.lines()]),
        table(head, level_lines(levels, answers_known)),
    ]
    return "\n\n".join([*parts, *misses(levels)])


def as_json(levels: Levels, setting: Sequence[str]) -> dict[str, Any]:
    """Every value."""
    return {
        "setting": list(setting),
        "comparisons": [one.as_dict() for one in comparisons(levels)],
        "levels": {name: [asdict(one) for one in level.rounds] for name, level in levels.items()},
        "misses": misses(levels),
    }
