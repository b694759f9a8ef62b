"""From a server's answers to `Figures`. What is missing, or is no number, counts as not seen."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from app.cli.doctor.figures import CodecUse, Setup, TierFill, Traffic
from app.cli.doctor.rules.extensions.chunks import separators_of
from app.cli.doctor.rules.extensions.sparser import form_level_of
from app.cli.samples import Samples
from app.cli.stored import stored_by_tier


def traffic_of(metrics: Samples, stats: Mapping[str, Any], setup: Setup | None) -> Traffic:
    """`metrics`: of GET /metrics; `stats`: of GET /api/v1/kv/stats for an administrator."""
    stages = metrics.by("crosskv_stage_seconds_sum", "stage")
    counters = _mapping(stats.get("counters"))
    return Traffic(
        plans=_whole(metrics.by("crosskv_plans_total", "reason")),
        parted=_whole(metrics.by("crosskv_parted_prompts_total", "cause")),
        tokens=_whole(metrics.by("crosskv_prompt_tokens_total", "source")),
        ttft_s=metrics.mean("crosskv_time_to_first_token_seconds"),
        load_share=stages.get("load", 0.0) / sum(stages.values()) if any(stages.values()) else None,
        tiers={
            tier: TierFill(stored.nbytes, stored.budget_bytes)
            for tier, stored in stored_by_tier(stats).items()
            if stored.budget_bytes
        },
        codecs=_codecs(metrics),
        credits={tier: float(share) for tier, share in _mapping(stats.get("credits")).items()},
        refused_demotions=_int(counters.get("refused_demotions")),
        chunk_tokens=_int(counters.get("chunk_tokens_asked")),
        device_pool_bytes=_pool_bytes(metrics, setup),
        nodes=max(1, len(_mapping(stats.get("cpu_tiers")))),
    )


def setup_of(shown: Mapping[str, Any]) -> Setup:
    """`shown`: of GET /api/v1/settings (`app.control.settings_shown`)."""
    settings, effect, machine = (_mapping(shown.get(part)) for part in ("settings", "in_effect", "machine"))
    model = _mapping(shown.get("model"))
    kv, engine = _mapping(settings.get("kv")), _mapping(settings.get("engine"))
    layerwise, roles = _mapping(kv.get("layerwise")), _mapping(settings.get("roles"))
    target = kv.get("ttft_target_s")
    return Setup(
        kv_enabled=bool(kv.get("enabled", True)),
        accelerator=machine.get("accelerator"),
        cores=machine.get("cores"),
        memory_bytes=machine.get("memory_bytes"),
        cpu_dtype=machine.get("cpu_dtype"),
        dtype=effect.get("dtype"),
        threads=engine.get("threads"),
        ranks=_int(engine.get("tensor_parallel_size")) or 1,
        shared_memory_bytes=machine.get("shared_memory_free_bytes"),
        replica_bytes=_mapping(effect.get("replica_bytes")),
        replicas=effect.get("replicas"),
        least_replicas=_mapping(settings.get("replicas")).get("min"),
        roles=bool(roles.get("prefill")),
        tenants=_int(effect.get("tenants")),
        block_tokens=effect.get("block_size_tokens"),
        device_blocks=effect.get("device_blocks"),
        kv_bytes_per_token=model.get("kv_bytes_per_token"),
        layerwise=layerwise.get("enabled"),
        separators=separators_of(settings),
        fidelity=str(kv.get("fidelity", "exact")),
        tenant_fidelity=_of_tenants(settings, "fidelity"),
        redis=effect.get("redis"),
        redis_required=bool(kv.get("redis_required")),
        redis_codec=effect.get("redis_codec"),
        form_level=form_level_of(kv),
        redis_bytes=kv.get("redis_bytes"),
        redis_expire_s=kv.get("redis_expire_s"),
        redis_min_uses=kv.get("redis_min_uses"),
        cpu_tier_bytes=kv.get("cpu_tier_bytes"),
        tenant_cpu_bytes=_of_tenants(settings, "cpu_bytes"),
        load_or_recompute=kv.get("load_or_recompute"),
        prefetch_workers=kv.get("prefetch_workers"),
        ttft_target_s=target if target is not None else _mapping(settings.get("scaling")).get("ttft_target_s"),
    )


def _of_tenants(settings: Mapping[str, Any], field: str) -> dict[str, Any]:
    """What tenants have of one setting, by name."""
    owns = {name: _mapping(own).get(field) for name, own in _mapping(settings.get("tenants")).items()}
    return {name: value for name, value in owns.items() if value is not None}


def _codecs(metrics: Samples) -> dict[str, CodecUse]:
    encoded = metrics.by("crosskv_compression_duration_seconds_count", "codec")
    decoded = metrics.by("crosskv_decompression_duration_seconds_count", "codec")
    spent = metrics.by("crosskv_decompression_duration_seconds_sum", "codec")
    return {
        codec: CodecUse(int(encoded.get(codec, 0)), int(decoded.get(codec, 0)), spent.get(codec, 0.0))
        for codec in {*encoded, *decoded}
    }


def _pool_bytes(metrics: Samples, setup: Setup | None) -> int | None:
    blocks = max(metrics.values("crosskv_device_blocks"), default=0)
    if setup is None or not blocks or not setup.block_tokens or not setup.kv_bytes_per_token:
        return None
    return int(blocks) * setup.block_tokens * setup.kv_bytes_per_token


def _whole(sums: Mapping[str, float]) -> dict[str, int]:
    return {name: int(value) for name, value in sums.items()}


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _int(value: Any) -> int:
    return int(value) if isinstance(value, int | float) else 0
