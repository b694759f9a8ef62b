"""Storage is dear: cold KV should lie compressed, and hot KV should not."""

from __future__ import annotations

from app.cli.doctor.advice import Advice, Severity
from app.cli.doctor.figures import Figures, Setup
from app.cli.doctor.room import cpu_tier_within
from app.cli.doctor.rules.extensions.sparser import sparser

FULL = 0.85
"""Share of its budget above which a tier counts as full: below the CPU tier's high water, 0.9."""
_TIMES_DECODED = 3
_PAGE = "docs/concepts/compression.md"


def compress_cold_data(figures: Figures) -> Advice | None:
    """Redis is full, or has refused segments: its KV can take less room."""
    setup, redis = figures.setup, figures.traffic.tiers.get("redis")
    refused = figures.traffic.refused_demotions
    if setup is None or redis is None or (redis.fill < FULL and not refused):
        return None
    tolerant = "tolerant" in (setup.fidelity, *setup.tenant_fidelity.values())
    smaller = _smaller(setup, tolerant)
    if smaller is None:
        return None
    severity, setting, value, why = smaller
    return Advice(
        "compress-cold-data",
        severity,
        f"Redis is {redis.fill:.0%} full, {refused} segments found no room, kv.redis_codec is {setup.redis_codec}",
        setting,
        value,
        why,
        f"{_PAGE}#what-the-codecs-cost-and-save",
    )


def _smaller(setup: Setup, tolerant: bool) -> tuple[Severity, str, str, str] | None:
    """The next step that makes KV in Redis smaller: the one that costs no answers first."""
    if setup.redis_codec == "raw":
        why = "KV in Redis is cold: coded without loss it takes less room, and answers stay what they are, bit by bit."
        return Severity.WARNING, "kv.redis_codec", "lossless", why
    if not tolerant:
        why = "Exact KV does not get smaller than this. Where answers may differ a little, KV with loss takes far less."
        if not setup.tenants:
            return Severity.INFO, "kv.fidelity", "tolerant", why
        return Severity.INFO, "tenants.NAME.fidelity", "tolerant", why
    return sparser(setup)


def compressing_hot_data(figures: Figures) -> Advice | None:
    """What is coded in Redis is decoded again and again, and most of what is reused comes from there: it is hot."""
    traffic, setup = figures.traffic, figures.setup
    coded = [use for codec, use in traffic.codecs.items() if codec != "raw"]
    encoded, decoded = sum(use.encoded for use in coded), sum(use.decoded for use in coded)
    tokens = traffic.tokens
    from_redis = tokens.get("redis", 0)
    if setup is None or not setup.cpu_tier_bytes or not decoded or decoded < _TIMES_DECODED * max(encoded, 1):
        return None
    if from_redis <= tokens.get("cpu", 0) + tokens.get("device", 0):
        return None
    larger = cpu_tier_within(figures, 2 * setup.cpu_tier_bytes)
    if larger is None:
        return None
    spent = sum(use.decoding_s for use in coded)
    return Advice(
        "compressing-hot-data",
        Severity.WARNING,
        f"{decoded} segments were decoded and {encoded} encoded, {spent:.1f} s in all; {from_redis} tokens came from "
        f"Redis, {tokens.get('cpu', 0)} from the CPU tier",
        "kv.cpu_tier_bytes",
        str(larger),
        "KV that is used again and again lies coded in Redis. In a larger CPU tier it stays raw: nothing is decoded.",
        _PAGE,
    )
