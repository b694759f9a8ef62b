"""Settings that are gone, and what replaces each: who still has one is told in the sentence that refuses it."""

from __future__ import annotations

_MEASURED = "what a reused token saves is measured while serving (docs/concepts/routing.md); leave it out."
_RATIO = "requests say it, `kv_cache: {recompute_ratio: …}`, else it is `blending.recompute_ratio`; leave it out."

REMOVED = {
    "kv.hotness_half_life_requests": "it is 1,000 requests, the best value on the traces; leave it out.",
    "kv.cpu_high_water": "a CPU tier's coldest segments move to Redis above 90 % of `kv.cpu_tier_bytes`; leave it out.",
    "kv.tolerant_codec": "KV of tolerant prompts is stored by CacheGen's codec, at `kv.tolerant_level`; leave it out.",
    "routing.device_credit": _MEASURED,
    "routing.cpu_credit": _MEASURED,
    "routing.redis_credit": _MEASURED,
    "routing.decode_weight": "a block of a running request weighs one prefill token; leave it out.",
    "blending.max_blends_waiting": "it is 16, and half of the device's blocks at most; leave it out.",
    "blending.buffer_bytes": "the chunks of a blend have 512 MiB of host memory; leave it out.",
    "kv.plan_deadline_s": "it is an eighth of `kv.load_deadline_s`; leave it out.",
    "kv.tier_deadline_s": "it is a quarter of `kv.load_deadline_s`; leave it out.",
    "kv.save_deadline_s": "a save may take `kv.lease_s`; leave it out.",
    "kv.codec_profiles": "codec profiles lie in `.crosskv/profiles`, which `CROSSKV_FOLDER` moves; leave it out.",
    "kv.max_ghosts": "the use counts of 100,000 evicted segments are remembered, of fewer where tiers are small; leave "
    "it out.",
    "kv.layerwise.buffer_bytes": "it is a group of layers of the longest prompt, and at least 256 MiB; leave it out.",
    "kv.layerwise.group_layers": "an eighth of the model's layers move together, and at least one; leave it out.",
    "roles.handover_deadline_s": "it is a quarter of `kv.load_deadline_s`; leave it out.",
    "roles.least_tokens": "it is 256, and with `roles.split: always` a block of the engine's; leave it out.",
    "engine.enable_auto_tool_choice": "with `engine.tool_call_parser` the model may choose, and requests may say "
    "`tool_choice: none`; leave it out.",
    "blending.check_layer": "it is what `make profile-blend` finds for the model, else 2; leave it out.",
    "blending.min_chunk_tokens": "chunks have 64 tokens and a block, or more; leave it out.",
    "http.api_keys_file": "the keys of that file may stand in the file of `secrets_file`, as `http: {api_keys: …}`.",
    "http.metrics_max_age_s": "it is 1 s, and none for a request with `Cache-Control: no-cache`; leave it out.",
    "http.answer_lengths_bytes": "it is 5/16 of `http.answer_memory_bytes`; leave it out.",
    "http.max_tools_bytes": "the `tools` of a request may have 2 MiB as JSON; leave it out.",
    "http.open_bodies_bytes": "64 MiB of bodies are received at the same time, or one body; leave it out.",
    "http.poison_refused_s": "a prompt that has ended an engine is refused for 600 s; leave it out.",
    "http.stream_timeout_s": "a stream may take 6 hours, and be silent for `http.request_timeout_s`; leave it out.",
    "http.constraint_timeout_s": "a grammar has 5 s to be built; leave it out.",
    "http.body_timeout_s": "a request's body has 60 s; leave it out.",
    "blending.tenant_recompute_ratio": _RATIO,
    "tenants.NAME.recompute_ratio": _RATIO,
    "kv.redis_deadline_s": "it is a quarter of `kv.load_deadline_s`, and at least 0.5 s; leave it out.",
    "roles.decode": "the replicas that do not prefill decode, `replicas` less `roles.prefill`; leave it out.",
    "engine.log_stats": "vLLM's metrics are always counted; leave it out.",
    "seed": "it is vLLM's own: `engine: {extra_args: {seed: 7}}`; requests may say their own.",
    "http.stream_silence_s": "it is `http.request_timeout_s`; leave it out.",
    "http.keep_alive_s": "it is 10 s; leave it out.",
    "http.chat_template_content_format": "it is found out when the server starts; leave it out.",
    "http.resume_most_tokens": "an answer of up to 32,768 tokens goes on at another replica; leave it out.",
    "http.debug_headers": "`X-CrossKV-Replica` and `X-CrossKV-Stages` are obeyed of administrators; leave it out.",
    "http.retry_after_s": "`Retry-After` says 1 s, or when the tenant's rate allows the next request; leave it out.",
} | {
    old: f"it is one tenant's now: `tenants: {{NAME: {{{new}: {value}}}}}`."
    for old, new, value in (
        ("kv.tenant_cpu_bytes", "cpu_bytes", "1GiB"),
        ("kv.tenant_redis_bytes", "redis_bytes", "1GiB"),
        ("kv.tenant_pin_bytes", "pin_bytes", "64MiB"),
        ("kv.tenant_fidelity", "fidelity", "tolerant"),
        ("http.tenant_requests_per_minute", "requests_per_minute", "60"),
        ("http.tenant_tokens_per_minute", "tokens_per_minute", "10000"),
        ("http.tenant_weights", "weight", "2"),
    )
}
"""By dotted name, what to do."""

OF_LOAD_PATHS = {"layerwise": "`layerwise` is `kv.layerwise.enabled`, which `off` turns off; leave it out here."}
"""What was a word of `kv.load_paths`, and what replaces it."""
