"""From one workload's measurements on one server to the figures that are compared. Seconds, tokens, bytes."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from load_tests.harness.client import Measured
from load_tests.measuring.spread import percentile

TIERS = ("device", "cpu", "redis")


@dataclass(frozen=True)
class Latency:
    """Of so many requests; None where there were none."""

    count: int
    mean: float | None
    p50: float | None
    p95: float | None

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Latency:
        """Percentiles lie between the two nearest values."""
        known = [value for value in values if value is not None]
        if not known:
            return cls(0, None, None, None)
        return cls(len(known), statistics.fmean(known), percentile(known, 50), percentile(known, 95))


@dataclass(frozen=True)
class Figures:
    """Of one workload on one server. `reuse` is in prompt tokens by tier; failed requests count in `errors` only."""

    requests: int
    errors: int
    error: str | None
    duration_s: float
    ttft: Latency
    ttft_returning: Latency
    ttft_cold: Latency
    tpot: Latency
    prompt_tokens: int
    output_tokens: int
    output_tokens_per_s: float
    recomputed_tokens: int
    reuse: dict[str, int]
    balance: float | None
    cpu_s: float
    pss_bytes: int

    def in_words(self) -> str:
        """What a person wants to see while it goes on."""
        latency = {"returning": self.ttft_returning.mean, "cold": self.ttft_cold.mean}
        times = [f"TTFT {name} {1e3 * mean:.0f} ms" for name, mean in latency.items() if mean is not None]
        failed = [f"{self.errors} of {self.requests} failed ({self.error})"] if self.errors else []
        return ", ".join([*times, f"{self.output_tokens_per_s:.1f} output tokens/s", *failed])


def figures(measured: Sequence[Measured], balance: float | None, cpu_s: float, pss: int) -> Figures:
    """Throughput is over the time from the first request sent to the last answer's end."""
    good = [one for one in measured if one.error is None]
    failed = [one.error for one in measured if one.error is not None]
    duration = max((one.ended_s for one in measured), default=0.0) - min((one.sent_s for one in measured), default=0.0)
    prompt = sum(one.prompt_tokens for one in good)
    output = sum(one.output_tokens for one in good)
    reuse = {tier: sum(_reused(one, tier) for one in good) for tier in TIERS}
    return Figures(
        requests=len(measured),
        errors=len(failed),
        error=failed[0] if failed else None,
        duration_s=duration,
        ttft=Latency.of(one.ttft_s for one in good),
        ttft_returning=Latency.of(one.ttft_s for one in good if one.returning),
        ttft_cold=Latency.of(one.ttft_s for one in good if not one.returning),
        tpot=Latency.of(one.tpot_s for one in good),
        prompt_tokens=prompt,
        output_tokens=output,
        output_tokens_per_s=output / duration if duration > 0 else 0.0,
        recomputed_tokens=prompt - sum(reuse.values()),
        reuse=reuse,
        balance=balance,
        cpu_s=cpu_s,
        pss_bytes=pss,
    )


def _reused(one: Measured, tier: str) -> int:
    """A server without tiers has its engine's prefix cache only."""
    if one.kv_cache is not None:
        return int(one.kv_cache[tier])
    return (one.cached_tokens or 0) if tier == "device" else 0
