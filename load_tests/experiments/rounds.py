"""Rounds of a tiered engine as rows: what experiments 7, 9 and 10 share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from load_tests.experiments.experiment import Engine, Point, Row, spread

SOURCES = ("none", "device", "cpu", "redis")
"""Where a prompt's KV comes from; `none`: it is computed."""


def rounds(point: Point, engine: Engine) -> list[dict[str, Any]]:
    """See `tiered_engine.TieredHost.round`; each with a prompt of its own."""
    values = point.values
    named = {"codec": values["codec"]} if "codec" in values else {}
    return [
        engine.call("round", tokens=values["prompt_tokens"], max_tokens=values["answer_tokens"], **named)
        for _ in range(values["repeats"])
    ]


def times_by_source(found: Sequence[dict[str, Any]], time: str, sources: Sequence[str] = SOURCES) -> Row:
    """`{source}_{time}` with spread, and `{source}_ratio` to the same round's `none`."""
    row: Row = {}
    for source in sources:
        row |= spread(f"{source}_{time}", [one[source][time] for one in found])
        row |= spread(f"{source}_ratio", [one[source][time] / one["none"][time] for one in found])
    return row


def least_reused(found: Sequence[dict[str, Any]], source: str) -> float:
    """Of the prompt's tokens, the least part that really came from there: less where a load missed its deadline."""
    most = max(one["device"]["reused"] for one in found)
    return min(one[source]["reused"] for one in found) / max(1, most)
