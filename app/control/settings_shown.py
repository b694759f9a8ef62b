"""The settings in effect as plain values, without what is secret: what GET /api/v1/settings shows administrators.

What `configs` marks with `repr=False` is secret, and is left out. Of `engine.extra_args`, which may hold a hub's token,
only the names are shown. Light: `crosskv doctor` makes the same of a settings file, where no server runs.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from app.launch.memory import replica_bytes, shared_memory_free_bytes
from configs import machine
from configs.machine.cores import cores
from configs.section import secret_fields
from configs.settings import Settings

_BYTES_OF = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class ModelShape:
    """What a model's KV weighs: its layers, bytes per token in all of them, and the longest request, in tokens."""

    layers: int
    kv_bytes_per_token: int
    longest_request_tokens: int


def settings_shown(settings: Settings, model: ModelShape | None) -> dict[str, Any]:
    """`settings`: the tree; `in_effect`: what the empty ones come to here; `model`: None where its shape is unknown.

    `replica_bytes`: of main memory, by type; an estimate.
    """
    tree = settings.model_dump(mode="json", exclude=secret_fields(Settings))
    tree["engine"]["extra_args"] = sorted(settings.engine.extra_args)
    layerwise = settings.kv.layerwise
    return {
        "settings": tree,
        "in_effect": {
            "model": settings.model_name,
            "dtype": settings.engine_dtype,
            "replicas": settings.max_replicas,
            "block_size_tokens": settings.block_size_tokens,
            "device_blocks": settings.device_blocks,
            "max_num_batched_tokens": settings.max_num_batched_tokens,
            "engine_process": settings.engine_process,
            "redis": _redis(settings),
            "redis_codec": settings.redis_codec,
            "tenants": len(settings.http.tenants),
            "replica_bytes": {dtype: replica_bytes(settings, dtype) for dtype in (*_BYTES_OF, settings.engine_dtype)},
            "layers_per_group": layerwise.layers_per_group(model.layers) if model else None,
        },
        "model": asdict(model) if model else None,
        "machine": {
            "accelerator": machine.accelerator(),
            "cores": cores(),
            "memory_bytes": machine.memory_bytes(),
            "shared_memory_free_bytes": shared_memory_free_bytes(),
            "cpu_dtype": machine.cpu_dtype(),
        },
    }


def shape_of_kv(layers: int, numbers_per_token: int, settings: Settings, models_own_limit: int) -> ModelShape | None:
    """A model's shape from its folder's figures (`configs.model_folder`); None while vLLM chooses the dtype."""
    size = _BYTES_OF.get(settings.engine_dtype)
    if size is None:
        return None
    return ModelShape(layers, numbers_per_token * size, settings.longest_request_tokens(models_own_limit))


def _redis(settings: Settings) -> str | None:
    """Return the kind of Redis, without its address, which may hold a password; None: there is none."""
    if settings.kv.redis_url is None:
        return None
    return "embedded" if settings.kv.redis_embedded else "external"
