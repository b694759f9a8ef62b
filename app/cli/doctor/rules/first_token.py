"""The first token is late, and loads that nothing hides are a reason."""

from __future__ import annotations

from app.cli.doctor.advice import Advice, Severity
from app.cli.doctor.figures import Figures

MUCH = 0.3
"""Share of the time to first tokens that waiting for loads may be."""
MOST_WORKERS = 64


def hide_loads(figures: Figures) -> Advice | None:
    """TTFT is above its target, and loads are much of it."""
    traffic, setup = figures.traffic, figures.setup
    if setup is None or traffic.ttft_s is None or setup.ttft_target_s is None or traffic.load_share is None:
        return None
    if traffic.ttft_s <= setup.ttft_target_s or traffic.load_share < MUCH:
        return None
    cpu, redis = traffic.tokens.get("cpu", 0), traffic.tokens.get("redis", 0)
    evidence = (
        f"the first token comes after {traffic.ttft_s:.2f} s, not {setup.ttft_target_s:g} s; {traffic.load_share:.0%} "
        f"of that are loads; {cpu} tokens came from the CPU tier, {redis} from Redis"
    )
    if redis > cpu:
        workers = min(2 * (setup.prefetch_workers or 1), MOST_WORKERS)
        if setup.prefetch_workers == workers:
            return None
        why = (
            "Redis brings whole segments: its loads cannot hide. More workers help, or POST /api/v1/kv/prefetch ahead."
        )
        page = "docs/concepts/loading.md#prefetch-long-prefixes-from-redis"
        return Advice("hide-loads", Severity.WARNING, evidence, "kv.prefetch_workers", str(workers), why, page)
    if setup.layerwise == "on":
        return None
    value = "auto" if setup.layerwise == "off" else "on"
    why = "Loaded layer by layer, KV from the CPU tier arrives under the computation of what is left of the prompt."
    page = "docs/concepts/loading.md#layer-by-layer"
    return Advice("hide-loads", Severity.WARNING, evidence, "kv.layerwise.enabled", value, why, page)
