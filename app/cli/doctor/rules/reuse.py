"""Reuse saves little: prompts that begin otherwise each time, KV that left too soon, tiers that are slower than
computing, loads that nothing hides.
"""

from __future__ import annotations

from app.cli.doctor.advice import Advice, Severity
from app.cli.doctor.figures import Figures, Setup
from app.cli.doctor.room import MIB, cpu_tier_within, redis_within
from app.cli.doctor.rules.storage import FULL
from app.metrics.labels import BY_BILLING_LINE, BY_DATE, BY_ID, BY_TEMPLATE, PARTED

LOW_HIT_RATE = 0.3
"""Conversations reach more than that (docs/measured/benchmarks.md); unrelated questions do not."""
MANY, MOST = 0.2, 0.5
"""Shares of all prompts: worth a change, and the rule rather than the exception."""
MUCH = 0.3
"""Share of the time to first tokens that waiting for loads may be."""
MOST_WORKERS = 64
_NEW_TIER_BYTES, _LEAST_TIER_BYTES = 1024 * MIB, 64 * MIB
"""Of a tier where there is none yet: what it has by default, and what is too little to be worth it."""

_WHAT_TO_DO = {
    BY_TEMPLATE: "send the same first turns and the same tools in the same order",
    BY_BILLING_LINE: "switch the client's billing line off, or begin the system message with it: it is left out there",
    BY_DATE: "put the date behind what stays the same, as into the last message, or round it; see also chat_template",
    BY_ID: "put the id behind what stays the same, or leave it out",
}


def volatile_heads(figures: Figures) -> Advice | None:
    """Many prompts differ from others in a few tokens in front only: nothing behind those is found."""
    parted = {cause: count for cause in PARTED if (count := figures.traffic.parted.get(cause, 0))}
    if not parted or sum(parted.values()) < MANY * figures.traffic.prompts:
        return None
    most = max(parted, key=lambda cause: parted[cause])
    counts = ", ".join(f"{cause} {count}" for cause, count in parted.items())
    return Advice(
        "volatile-heads",
        Severity.WARNING,
        f"{sum(parted.values())} of {figures.traffic.prompts} prompts began otherwise than one with the same text "
        f"behind: {counts}",
        "",
        _WHAT_TO_DO.get(most, "put what differs behind what stays the same"),
        "KV is reused from the first token on. What differs in front makes all that follows another prompt.",
        "docs/guide/troubleshooting.md#prompts-that-begin-otherwise-each-time",
    )


def keep_kv_longer(figures: Figures) -> Advice | None:
    """Few tokens are found, and many prompts were there before: their KV has left every tier."""
    setup, evicted = figures.setup, share_of(figures, "evicted")
    if setup is None or figures.traffic.hit_rate >= LOW_HIT_RATE or evicted < MANY:
        return None
    changed = _more_room(figures, setup)
    if changed is None:
        return None
    setting, value, why, also = changed
    fills = ", ".join(f"{tier} {of.fill:.0%}" for tier, of in figures.traffic.tiers.items())
    return Advice(
        "keep-kv-longer",
        Severity.WARNING,
        f"{figures.traffic.hit_rate:.0%} of prompt tokens were reused; {evicted:.0%} of prompts had been there, and "
        f"their KV had left; full: {fills or 'unknown'}",
        setting,
        value,
        why,
        "docs/concepts/eviction.md#between-the-tiers",
        also,
    )


def _more_room(figures: Figures, setup: Setup) -> tuple[str, str, str, dict[str, str]] | None:
    """What keeps KV longer: a tier more, a larger one, or one that forgets later. And what has to be set with it."""
    redis = figures.traffic.tiers.get("redis")
    if setup.redis is None and not setup.cpu_tier_bytes:
        tier = cpu_tier_within(figures, _NEW_TIER_BYTES)
        if tier is None or tier < _LEAST_TIER_BYTES:
            return None
        return "kv.cpu_tier_bytes", str(tier), "There is no shared tier at all: what leaves a device is gone.", {}
    if setup.redis is None:
        return _a_redis(figures, setup)
    if redis is not None and redis.fill >= FULL and setup.redis_bytes:
        larger = 2 * setup.redis_bytes
        found = redis_within(figures, larger, setup.redis_bytes) if setup.redis == "embedded" else larger
        if found is None:
            return None
        return "kv.redis_bytes", str(found), "Redis is full: it keeps more with more room.", {}
    if setup.redis_min_uses is not None and setup.redis_min_uses > 1:
        why = "KV that was used once is not copied to Redis, so it goes with the CPU tier."
        return "kv.redis_min_uses", "1", why, {}
    if setup.redis_expire_s:
        why = "Redis has room, and forgets by time: let it keep longer."
        return "kv.redis_expire_s", str(4 * setup.redis_expire_s), why, {}
    return None


def _a_redis(figures: Figures, setup: Setup) -> tuple[str, str, str, dict[str, str]]:
    """One of the server's own where this machine has room for it."""
    also: dict[str, str] = {}
    wanted = setup.redis_bytes or _NEW_TIER_BYTES
    found = redis_within(figures, wanted, 0)
    why = "There is no Redis tier: what leaves the CPU tier is gone."
    if found is None or found < min(wanted, _LEAST_TIER_BYTES):
        why = f"{why} This machine has no room for one next to the CPU tier, so it has to be another's."
        return "kv.redis_url", "redis://HOST:6379/0", why, also
    if found < wanted:
        also["kv.redis_bytes"] = str(found)
    return "kv.redis_url", "embedded", why, also


def tier_slower_than_recompute(figures: Figures) -> Advice | None:
    """A tier's loads save nothing compared with computing, as measured."""
    setup, credits = figures.setup, figures.traffic.credits
    slow = [tier for tier in ("redis", "cpu") if tier in credits and credits[tier] <= 0]
    if setup is None or not slow or setup.load_or_recompute == "recompute":  # then all credits are 0, unmeasured
        return None
    tier = slow[0]
    faster = figures.traffic.plans.get("recompute_faster", 0)
    evidence = (
        f"a token from {tier} saves {max(credits[tier], 0.0):.0%} of its prefill; {faster} prompts computed instead"
    )
    name, page = "tier-slower-than-recompute", "docs/concepts/loading.md#load-or-recompute"
    if setup.load_or_recompute == "load":
        why = "Everything is loaded, though computing is faster. `auto` loads what brings the first token sooner."
        return Advice(name, Severity.WARNING, evidence, "kv.load_or_recompute", "auto", why, page)
    if tier == "redis":
        why = "What lies in Redis is not worth loading here: give its memory back, or use a faster Redis or link."
        also = {"kv.redis_required": "false"} if setup.redis_required else {}
        return Advice(name, Severity.INFO, evidence, "kv.redis_url", "null", why, page, also)
    # KV reaches Redis, and is handed over between roles, through the CPU tier; quotas are parts of it
    if setup.redis is not None or setup.roles or setup.tenant_cpu_bytes:
        return None
    why = "What lies in the CPU tier is not worth loading here: a smaller one, or none, leaves its memory to others."
    return Advice(name, Severity.INFO, evidence, "kv.cpu_tier_bytes", "0", why, page)


def share_of(figures: Figures, reason: str) -> float:
    """Return the share of prompts whose KV was loaded or computed for this reason."""
    prompts = figures.traffic.prompts
    return figures.traffic.plans.get(reason, 0) / prompts if prompts else 0.0


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
