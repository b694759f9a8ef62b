"""The three questions' figures: tables, targets that were missed, JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from load_tests.measuring import report
from load_tests.measuring.comparison import COLUMNS, Bound, Comparison
from load_tests.tenants.servers import Scenario

ALONE, BESIDE, ONE_TENANT = "alone", "with a flood", "with a flood, as one tenant"
FITTING = "with what leaves a slot free"
"""The other tenant never waits: what sharing an engine costs, without any line."""
HELD, NOT_HELD = "two tenants", "one tenant"
MOST_SHARE_ERROR = 0.1
TARGET = f"within {MOST_SHARE_ERROR:.0%} of 1"


@dataclass(frozen=True)
class Shares:
    """One run with two tenants that always wait: the ratio in each window."""

    weight: float
    ratios: Sequence[float]

    @property
    def words(self) -> str:
        """From least to most."""
        return f"{min(self.ratios):.3f} to {max(self.ratios):.3f}"

    @property
    def misses(self) -> bool:
        """Whether any window is farther off than it should be."""
        return max(abs(ratio - 1) for ratio in self.ratios) > MOST_SHARE_ERROR


@dataclass(frozen=True)
class Found:
    """All that was measured."""

    scenario: Scenario
    modest: Comparison | None
    throughput: Comparison | None
    shares: Sequence[Shares]

    @property
    def misses(self) -> list[str]:
        """A sentence for each target that was missed."""
        compared = [sentence for one in (self.modest, self.throughput) if one for sentence in one.misses()]
        return compared + [
            f"Missed: shares at weights {one.weight:g}:1 are {one.words}; the target is {TARGET}."
            for one in self.shares
            if one.misses
        ]

    def markdown(self) -> str:
        """For people."""
        parts = []
        lines = [line for one in (self.modest, self.throughput) if one for line in one.lines()]
        if lines:
            parts.append(report.table(COLUMNS, lines))
        if self.shares:
            parts.append(
                report.table(
                    ["weights", "cost ÷ weight, one over the other, in any 60 s", "windows", "target"],
                    [[f"{one.weight:g}:1", one.words, str(len(one.ratios)), TARGET] for one in self.shares],
                )
            )
        plan = self.scenario
        parts.append(
            report.wrapped(
                f"*{plan.replicas} replica of {plan.slots} slots, the demo model. The modest tenant sends "
                f"{plan.modest_per_s:g} requests a second, of 40 to 200 tokens with 4 to 24 of answer. The other keeps "
                f"{plan.flood} under way, of 200 to 600 with 24 to 96. Least / median / most over the rounds.*"
            )
        )
        return "\n\n".join(parts) + report.bullets(self.misses) * bool(self.misses) + "\n"

    def as_json(self) -> dict[str, Any]:
        """For programs."""
        return {
            "scenario": asdict(self.scenario),
            "modest": self.modest and self.modest.as_dict(),
            "throughput": self.throughput and self.throughput.as_dict(),
            "shares": [asdict(one) for one in self.shares],
            "misses": self.misses,
        }


def modest(values: dict[str, list[float]]) -> Comparison:
    """The modest tenant's p95."""
    return Comparison("a modest tenant's p95", "s", ALONE, values, (BESIDE,), Bound(1.3))


def throughput(values: dict[str, list[float]]) -> Comparison:
    """Two tenants that the ingress holds back, compared with one that it does not."""
    return Comparison("cost served", "per s", NOT_HELD, values, (HELD,), Bound(0.98, at_most=False))
