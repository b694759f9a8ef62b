"""Measurements: a kernel and a plain copy of as many bytes take turns, and each pair gives a ratio.

A neighbour on the machine slows both of a pair alike, so the ratio's median says more than either rate. On the CPU time
is the calling thread's processor time: what it waits for a core, on a machine that is shared, counts for neither.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Clock = Callable[[Callable[[], None]], float]
"""Seconds that an operation takes."""

Unit = Literal["GB/s", "M symbols/s"]
_PER_UNIT: dict[Unit, float] = {"GB/s": 1e9, "M symbols/s": 1e6}


@dataclass(frozen=True)
class Target:
    """The least that the median must reach: a rate in the case's unit, or a share of memcpy's rate."""

    of: Literal["rate", "ratio"]
    least: float


@dataclass(frozen=True)
class Case:
    """One kernel on data that is far larger than the caches."""

    family: str
    """What ``--only`` names."""
    name: str
    amount: int
    """Bytes or symbols (a byte each) that one run goes through, counted once."""
    calls: int
    """Calls of the kernel in one run."""
    run: Callable[[], None]
    copy: Callable[[], None]
    """Copies ``amount`` bytes, in pieces of what one call of the kernel takes or makes."""
    unit: Unit = "GB/s"
    target: Target | None = None


@dataclass(frozen=True)
class Row:
    """The measured values of a case, one value for each repetition."""

    family: str
    name: str
    unit: Unit
    rates: list[float]
    copy_gb_per_s: list[float]
    ratios: list[float]
    """The copy's time over the kernel's."""
    microseconds_per_call: float
    target: Target | None

    @property
    def missed(self) -> str | None:
        """A sentence, when the median falls short of the target."""
        if self.target is None:
            return None
        values, unit = (self.rates, f" {self.unit}") if self.target.of == "rate" else (self.ratios, " of memcpy")
        median = statistics.median(values)
        if median >= self.target.least:
            return None
        return f"{self.name}: {median:.2f}{unit}, less than {self.target.least:g}"


def thread_seconds(operation: Callable[[], None]) -> float:
    """Processor time of the calling thread."""
    start = time.thread_time()
    operation()
    return time.thread_time() - start


def measure(case: Case, repetitions: int, clock: Clock = thread_seconds) -> Row:
    """Copy and kernel in turns, after one run of each that compiles and touches memory and is not counted."""
    case.copy()
    case.run()
    pairs = [(clock(case.copy), clock(case.run)) for _ in range(repetitions)]
    return Row(
        family=case.family,
        name=case.name,
        unit=case.unit,
        rates=[case.amount / run / _PER_UNIT[case.unit] for _, run in pairs],
        copy_gb_per_s=[case.amount / copy / 1e9 for copy, _ in pairs],
        ratios=[copy / run for copy, run in pairs],
        microseconds_per_call=statistics.median(run for _, run in pairs) / case.calls * 1e6,
        target=case.target,
    )
