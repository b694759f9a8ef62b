"""Settings that are gone, and what replaces each: who still has one is told in the sentence that refuses it."""

from __future__ import annotations

REMOVED = {
    old: f"it is one tenant's now: `tenants: {{NAME: {{{new}: {value}}}}}`."
    for old, new, value in (
        ("kv.tenant_cpu_bytes", "cpu_bytes", "1GiB"),
        ("kv.tenant_redis_bytes", "redis_bytes", "1GiB"),
        ("kv.tenant_pin_bytes", "pin_bytes", "64MiB"),
        ("kv.tenant_fidelity", "fidelity", "tolerant"),
        ("blending.tenant_recompute_ratio", "recompute_ratio", "0.3"),
        ("http.tenant_requests_per_minute", "requests_per_minute", "60"),
        ("http.tenant_tokens_per_minute", "tokens_per_minute", "10000"),
        ("http.tenant_weights", "weight", "2"),
    )
}
"""By dotted name, what to do."""
