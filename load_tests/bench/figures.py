"""From one workload's measurements on one server to the figures that are compared. Seconds, tokens, bytes."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from load_tests.harness.client import Measured
from load_tests.measuring.spread import percentile

TIERS = ("device", "cpu", "redis")
Figures = Mapping[str, Any]
"""Of one workload on one server, as JSON has them: see `figures`."""


def figures(measured: Sequence[Measured], balance: float | None, cpu_s: float, pss: int) -> dict[str, Any]:
    """Failed requests count in `errors` only, of which `error` is the first; `reuse` is in prompt tokens by tier,
    `blended_tokens` of these the ones that were computed behind other tokens.

    An `answer` is from its request to its end. Throughput is over the time from the first request sent to the last
    answer's end.
    """
    good = [one for one in measured if one.error is None]
    failed = [one.error for one in measured if one.error is not None]
    duration = max((one.ended_s for one in measured), default=0.0) - min((one.sent_s for one in measured), default=0.0)
    prompt = sum(one.prompt_tokens for one in good)
    output = sum(one.output_tokens for one in good)
    reuse = {tier: sum(_reused(one, tier) for one in good) for tier in TIERS}
    return {
        "requests": len(measured),
        "errors": len(failed),
        "error": failed[0] if failed else None,
        "duration_s": duration,
        "ttft": latency(one.ttft_s for one in good),
        "ttft_returning": latency(one.ttft_s for one in good if one.returning),
        "ttft_cold": latency(one.ttft_s for one in good if not one.returning),
        "tpot": latency(one.tpot_s for one in good),
        "answer": latency(one.ended_s - one.sent_s for one in good),
        "prompt_tokens": prompt,
        "output_tokens": output,
        "output_tokens_per_s": output / duration if duration > 0 else 0.0,
        "recomputed_tokens": prompt - sum(reuse.values()),
        "reuse": reuse,
        "blended_tokens": sum((one.kv_cache or {}).get("blended", 0) for one in good),
        "balance": balance,
        "cpu_s": cpu_s,
        "pss_bytes": pss,
    }


def latency(values: Iterable[float | None]) -> dict[str, Any]:
    """`count` of those that are known, `mean`, `p50` and `p95`; None where there are none."""
    known = [value for value in values if value is not None]
    if not known:
        return {"count": 0, "mean": None, "p50": None, "p95": None}
    p50, p95 = percentile(known, 50), percentile(known, 95)
    return {"count": len(known), "mean": statistics.fmean(known), "p50": p50, "p95": p95}


def in_words(found: Figures) -> str:
    """What a person wants to see while it goes on."""
    means = {name: found[f"ttft_{name}"]["mean"] for name in ("returning", "cold")}
    times = [f"TTFT {name} {1e3 * mean:.0f} ms" for name, mean in means.items() if mean is not None]
    failed = [f"{found['errors']} of {found['requests']} failed ({found['error']})"] if found["errors"] else []
    return ", ".join([*times, f"{found['output_tokens_per_s']:.1f} output tokens/s", *failed])


def _reused(one: Measured, tier: str) -> int:
    """A server without tiers has its engine's prefix cache only."""
    if one.kv_cache is not None:
        return int(one.kv_cache[tier])
    return (one.cached_tokens or 0) if tier == "device" else 0
