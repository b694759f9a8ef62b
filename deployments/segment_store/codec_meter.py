"""What coding segments takes and saves, by codec: counted in the prefetch workers, added up by their node's CPU tier.

Plain dicts travel between the processes: a metric of prometheus-client lives in one process, and its text names no sum.
"""

from __future__ import annotations

import bisect
import threading
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from typing import Any

BUCKETS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5)
"""Upper ends of the histograms' buckets; one more, without an end, follows."""


@dataclass(slots=True)
class Durations:
    """A histogram: `buckets` are not cumulative."""

    buckets: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS_S) + 1))
    total_s: float = 0.0

    def observe(self, seconds: float) -> None:
        """Count one."""
        self.buckets[bisect.bisect_left(BUCKETS_S, seconds)] += 1
        self.total_s += seconds


@dataclass(slots=True)
class CodecCount:
    """Of one codec: bytes of encoded segments before and after, and how long whole segments took."""

    raw_bytes: int = 0
    coded_bytes: int = 0
    encoding: Durations = field(default_factory=Durations)
    decoding: Durations = field(default_factory=Durations)


class CodecMeter:
    """Safe from any thread."""

    def __init__(self, codecs: Iterable[str] = ()) -> None:
        """`codecs`: those that will be used, reported before they are."""
        self._counts = {codec: CodecCount() for codec in codecs}
        self._lock = threading.Lock()

    def encoded(self, codec: str, raw_bytes: int, coded_bytes: int, seconds: float) -> None:
        """Note a segment that was encoded."""
        with self._lock:
            count = self._counts.setdefault(codec, CodecCount())
            count.raw_bytes += raw_bytes
            count.coded_bytes += coded_bytes
            count.encoding.observe(seconds)

    def decoded(self, codec: str, seconds: float) -> None:
        """Note a segment that was decoded."""
        with self._lock:
            self._counts.setdefault(codec, CodecCount()).decoding.observe(seconds)

    def report(self) -> dict[str, dict[str, Any]]:
        """By codec, what `CodecCount` counts, as plain values."""
        with self._lock:
            return {codec: asdict(count) for codec, count in self._counts.items()}


def added_up(reports: Iterable[dict[str, dict[str, Any]]]) -> dict[str, dict[str, Any]]:
    """Several workers' reports as one."""
    sums: dict[str, CodecCount] = {}
    for report in reports:
        for codec, counts in report.items():
            total = sums.setdefault(codec, CodecCount())
            total.raw_bytes += counts["raw_bytes"]
            total.coded_bytes += counts["coded_bytes"]
            for mine, theirs in ((total.encoding, counts["encoding"]), (total.decoding, counts["decoding"])):
                mine.buckets = [one + other for one, other in zip(mine.buckets, theirs["buckets"], strict=True)]
                mine.total_s += theirs["total_s"]
    return {codec: asdict(count) for codec, count in sums.items()}
