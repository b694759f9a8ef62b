"""Over the alternations: medians and spreads, ratios to the base arm of the same alternation, and the targets."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from load_tests.bench.arms import ARMS, BASE, BLENDED, EXACT
from load_tests.bench.figures import Figures
from load_tests.bench.plan import Key
from load_tests.measuring.comparison import Bound
from load_tests.measuring.interval import Interval, paired_interval, ratio_of_means, starts_interval
from load_tests.measuring.spread import Spread

Value = Callable[[Figures], float | None]

FIGURES: dict[str, tuple[str, Value]] = {
    "ttft_returning_s": ("TTFT of returning prompts, mean", lambda f: f["ttft_returning"]["mean"]),
    "ttft_returning_p50_s": ("the same, p50", lambda f: f["ttft_returning"]["p50"]),
    "ttft_returning_p95_s": ("the same, p95", lambda f: f["ttft_returning"]["p95"]),
    "ttft_cold_s": ("TTFT of cold prompts, mean", lambda f: f["ttft_cold"]["mean"]),
    "ttft_cold_p50_s": ("the same, p50", lambda f: f["ttft_cold"]["p50"]),
    "ttft_cold_p95_s": ("the same, p95", lambda f: f["ttft_cold"]["p95"]),
    "ttft_s": ("TTFT of all prompts, mean", lambda f: f["ttft"]["mean"]),
    "ttft_p50_s": ("the same, p50", lambda f: f["ttft"]["p50"]),
    "ttft_p95_s": ("the same, p95", lambda f: f["ttft"]["p95"]),
    "tpot_s": ("TPOT, mean", lambda f: f["tpot"]["mean"]),
    "answer_s": ("whole answers, mean", lambda f: f.get("answer", {}).get("mean")),  # journals of before have none
    "output_tokens_per_s": ("output tokens per second", lambda f: f["output_tokens_per_s"]),
    "recomputed_tokens": ("prompt tokens computed", lambda f: f["recomputed_tokens"]),
    "recomputed_share": ("of all prompt tokens", lambda f: _share(f["recomputed_tokens"], f["prompt_tokens"])),
    "device_share": ("reused from the device", lambda f: _share(f["reuse"]["device"], f["prompt_tokens"])),
    "cpu_share": ("reused from the CPU tier", lambda f: _share(f["reuse"]["cpu"], f["prompt_tokens"])),
    "redis_share": ("reused from Redis", lambda f: _share(f["reuse"]["redis"], f["prompt_tokens"])),
    "blended_share": ("of it blended", lambda f: _share(f.get("blended_tokens"), f["prompt_tokens"])),
    "blend_hit_rate": ("chunk tokens found", lambda f: f.get("blend_hit_rate")),
    "balance": ("CoV of requests by replica", lambda f: f["balance"]),
    "cpu_s": ("CPU seconds of the server", lambda f: f["cpu_s"]),
    "keeping_share": ("of it manager, tiers, Redis, workers", lambda f: _share(f.get("keeping_cpu_s"), f["cpu_s"])),
    "pss_bytes": ("memory (PSS) of the server", lambda f: f["pss_bytes"]),
    "errors": ("failed requests", lambda f: f["errors"]),
}
"""Name, title, and how it is read from a measurement."""


@dataclass(frozen=True)
class Row:
    """One arm on one workload of one size: spreads by figure, and those of the ratio to the base arm."""

    model: str
    workload: str
    working_set: float
    arm: str
    alternations: int
    values: Mapping[str, Spread | None]
    ratios: Mapping[str, Spread | None]
    intervals: Mapping[str, Interval | None]
    """Of the ratio of mean TTFTs, over the requests that both arms answered: by `PAIRED`. Over alternations, or over
    the requests of the only one."""


@dataclass(frozen=True)
class Target:
    """A bound of the median ratio of an arm to the base arm, for working sets within the device pools or beyond."""

    model: str
    workload: str
    beyond: bool
    figure: str
    bound: Bound
    arm: str = EXACT

    def applies(self, row: Row) -> bool:
        """Whether it is of this row's measurement."""
        mine = self.model, self.workload, self.beyond, self.arm
        return (row.model, row.workload, row.working_set > 1, row.arm) == mine


@dataclass(frozen=True)
class Verdict:
    """What became of a target in one row."""

    row: Row
    target: Target
    ratio: Spread

    @property
    def is_met(self) -> bool:
        """By the median."""
        return self.target.bound.holds(self.ratio.median)


def _both(
    model: str, workload: str, beyond: bool, ttft: float, tokens_per_s: float, arm: str = EXACT
) -> tuple[Target, Target]:
    """The target of the returning prompts' TTFT, and that of the throughput."""
    return (
        Target(model, workload, beyond, "ttft_returning_s", Bound(ttft), arm),
        Target(model, workload, beyond, "output_tokens_per_s", Bound(tokens_per_s, at_most=False), arm),
    )


TARGETS = (
    *_both("365m", "long-document-qa", True, 0.12, 2.2),
    *_both("365m", "multi-round-qa", True, 0.08, 3.0),
    *_both("365m", "long-document-qa", False, 0.6, 1.2),
    *_both("40m", "long-document-qa", True, 0.25, 1.8),
    *_both("40m", "multi-round-qa", True, 0.25, 1.8),
    *_both("365m", "rearranged-chunks", True, 0.3, 2.0, BLENDED),
    *_both("365m", "rearranged-chunks", False, 0.3, 2.0, BLENDED),
)

PAIRED: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    "ttft_returning_s": lambda request: bool(request["returning"]),
    "ttft_s": lambda request: True,
}
"""Figures that each request has one of: whether it counts. `request` is a `Measured`."""


def rows(
    measured: Mapping[Key, Figures], requests: Mapping[Key, Sequence[Mapping[str, Any]]] | None = None
) -> list[Row]:
    """A row for each model, workload, size and arm; the arms of one workload and size follow each other.

    `requests` are those of each measurement; without them there are no intervals.
    """
    groups: dict[tuple[str, str, float, str], list[Key]] = {}
    arms = list(ARMS)
    for key in sorted(measured, key=lambda key: (key.model, key.workload, key.working_set, arms.index(key.arm))):
        groups.setdefault((key.model, key.workload, key.working_set, key.arm), []).append(key)
    return [
        Row(
            *group,
            alternations=len(keys),
            values={
                name: Spread.of_known(value(measured[key]) for key in keys) for name, (_, value) in FIGURES.items()
            },
            intervals={name: _interval(requests or {}, keys, counts) for name, counts in PAIRED.items()},
            ratios={name: Spread.of_known(_ratios(measured, keys, value)) for name, (_, value) in FIGURES.items()},
        )
        for group, keys in groups.items()
    ]


def verdicts(found: Sequence[Row]) -> list[Verdict]:
    """Every target in every row that it applies to and whose ratio is known."""
    return [
        Verdict(row, target, ratio)
        for row in found
        for target in TARGETS
        if target.applies(row) and (ratio := row.ratios[target.figure])
    ]


def _ratios(measured: Mapping[Key, Figures], keys: Sequence[Key], value: Value) -> list[float]:
    """Of the alternations in which both arms were measured."""
    ratios = []
    for key in keys:
        base = measured.get(Key(key.model, key.alternation, BASE, key.workload, key.working_set))
        mine, theirs = value(measured[key]), value(base) if base else None
        if mine is not None and theirs:
            ratios.append(mine / theirs)
    return ratios


def _interval(
    requests: Mapping[Key, Sequence[Mapping[str, Any]]],
    keys: Sequence[Key],
    counts: Callable[[Mapping[str, Any]], bool],
) -> Interval | None:
    """Both arms had the same requests: they are paired by number, within an alternation, and that is one start."""
    starts: list[tuple[list[float], list[float]]] = []
    for key in keys:
        base = requests.get(replace(key, arm=BASE), ())
        other = {request["number"]: request["ttft_s"] for request in base if counts(request)}
        pairs = [
            (request["ttft_s"], other[request["number"]])
            for request in requests.get(key, ())
            if counts(request) and request["ttft_s"] and other.get(request["number"])
        ]
        if pairs:
            mine, theirs = zip(*pairs, strict=True)
            starts.append((list(mine), list(theirs)))
    if not starts:
        return None
    if len(starts) == 1:
        return paired_interval(*starts[0], ratio_of_means)
    return starts_interval([sum(mine) / sum(theirs) for mine, theirs in starts])


def _share(part: float | None, whole: float) -> float | None:
    return part / whole if whole and part is not None else None
