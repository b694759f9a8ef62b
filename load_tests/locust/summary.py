"""What a load test measured, in figures that Locust's own statistics lack: exact TPOT, tokens/s, the cached share."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from load_tests.measuring.spread import percentile


@dataclass(frozen=True)
class Sample:
    """One request of a user of class `kind`. With `turned_away` (429 with Retry-After) or `error` it has no figures."""

    kind: str
    returning: bool
    error: str | None = None
    turned_away: bool = False
    ttft_s: float | None = None
    tpot_s: float | None = None
    output_tokens: int = 0
    prompt_tokens: int | None = None
    cached_tokens: int | None = None


class Record:
    """The samples of one run, from this process and, where Locust is distributed, from its workers.

    Used from Locust's greenlets only, so that nothing needs a lock. Memory grows by about 200 bytes a request.
    """

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.began = self.ended = time.monotonic()
        self.running = False

    def start(self) -> None:
        """A run begins: forget the one before."""
        self.samples.clear()
        self.began = time.monotonic()
        self.running = True

    def stop(self) -> None:
        """The run is over; what comes later is of requests that end."""
        self.ended = time.monotonic()
        self.running = False

    def take(self) -> list[dict[str, Any]]:
        """All samples, for another process; they are forgotten here."""
        taken = [asdict(sample) for sample in self.samples]
        self.samples.clear()
        return taken

    def add(self, samples: Iterable[dict[str, Any]]) -> None:
        """What another process took."""
        self.samples.extend(Sample(**sample) for sample in samples)

    def summary(self) -> dict[str, Any]:
        """For JSON; see docs/tools/load_test.md."""
        seconds = (time.monotonic() if self.running else self.ended) - self.began
        kinds = sorted({sample.kind for sample in self.samples})
        return {
            "running": self.running,
            "seconds": seconds,
            "all": figures(self.samples, seconds),
            "classes": {kind: figures([s for s in self.samples if s.kind == kind], seconds) for kind in kinds},
            "errors": dict(Counter(s.error for s in self.samples if s.error is not None).most_common()),
        }

    def write(self, path: Path, facts: dict[str, Any]) -> None:
        """`facts` and the summary, so that a reader never sees half a file. Raises OSError."""
        temporary = path.with_name(f".{path.name}.{os.getpid()}")
        temporary.write_text(json.dumps({**facts, **self.summary()}, indent=2), encoding="utf-8")
        temporary.replace(path)


def figures(samples: Sequence[Sample], seconds: float) -> dict[str, Any]:
    """Counts, times in seconds, and rates over `seconds`; None where nothing was measured."""
    sent = [sample for sample in samples if not sample.turned_away]
    prompt_tokens = sum(sample.prompt_tokens or 0 for sample in sent if sample.cached_tokens is not None)
    cached_tokens = sum(sample.cached_tokens or 0 for sample in sent)
    output_tokens = sum(sample.output_tokens for sample in sent)
    return {
        "requests": len(sent),
        "failures": sum(sample.error is not None for sample in sent),
        "turned_away": len(samples) - len(sent),
        "ttft_s": _spread(sample.ttft_s for sample in sent),
        "ttft_first_s": _spread(sample.ttft_s for sample in sent if not sample.returning),
        "ttft_returning_s": _spread(sample.ttft_s for sample in sent if sample.returning),
        "tpot_s": _spread(sample.tpot_s for sample in sent),
        "output_tokens": output_tokens,
        "output_tokens_per_s": output_tokens / seconds if seconds else None,
        "cached_share": cached_tokens / prompt_tokens if prompt_tokens else None,
    }


def _spread(values: Iterable[float | None]) -> dict[str, float] | None:
    known = [value for value in values if value is not None]
    if not known:
        return None
    return {"mean": statistics.mean(known), "p50": percentile(known, 50), "p95": percentile(known, 95)}
