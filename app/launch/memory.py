"""Whether this machine has the memory that a server is going to use; asked before anything starts.

Beyond it nothing fails at once: Ray puts its object store on a disk, where a segment takes longer to read than to
compute, and some hours later the kernel ends a replica. The figures are estimates from the model's config.json and the
sizes of its files; a hub model that is not in a folder counts for its process alone.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from app.launch.cluster import object_store_bytes
from configs import machine
from configs.model_folder import find_model, latent_width, text_config
from configs.settings import Settings, SettingsError

SHARED_MEMORY = Path("/dev/shm")
_LARGEST_ON_A_DISK_BYTES = 10**10
_ALLOW_A_DISK = "RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE"
"""Ray's own limit for an object store on a disk, and its variable that lifts it (`ray_constants`)."""
_REPLICA_PROCESS_BYTES = 700 * 1024**2
"""A replica with the demo model, measured (docs/measured/overhead.md); the ingress weighs about as much."""
_ENGINE_PROCESS_BYTES = 500 * 1024**2
"""What an engine in a process of its own adds, and each rank of one, without the model; measured there too."""
_EVERYTHING_ELSE_BYTES = 1024**3
"""Ray's daemons, Serve's controller and proxy, the manager, the tiers and their workers."""
BESIDE_REPLICAS_BYTES = _REPLICA_PROCESS_BYTES + _EVERYTHING_ELSE_BYTES
_ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def check_memory(settings: Settings) -> None:
    """Raise SettingsError for a server whose parts are together more than this machine's memory."""
    replica = replica_bytes(settings, settings.engine_dtype)
    store = object_store_bytes(settings)
    redis = int(settings.kv.redis_bytes) if settings.kv.enabled and settings.kv.redis_embedded else 0
    needed = settings.max_replicas * replica + BESIDE_REPLICAS_BYTES + store + redis
    there = machine.memory_bytes()
    if needed > there:
        raise SettingsError(
            f"the server needs about {_gib(needed)} and this machine has {_gib(there)}: "
            f"{settings.max_replicas} replicas of {_gib(replica)} each, {_gib(store)} for the CPU tier "
            f"(kv.cpu_tier_bytes), {_gib(redis)} for Redis "
            f"(kv.redis_bytes), {_gib(BESIDE_REPLICAS_BYTES)} for the rest; lower replicas, "
            f"engine.device_blocks, kv.cpu_tier_bytes or kv.redis_bytes."
        )


def shared_memory_warning(settings: Settings, running: Settings | None = None) -> str | None:
    """What to say of an object store that does not fit; None where it does. `running` will have ended by the start.

    Raises SettingsError for one that Ray refuses to put on a disk.
    """
    free = shared_memory_free_bytes()
    if free is None:
        return None  # Ray has its own word for a system without it
    needed = object_store_bytes(settings)
    free += object_store_bytes(running) if running else 0
    if needed <= free:
        return None
    what_works = f"lower kv.cpu_tier_bytes, or give the container more: docker run --shm-size={-(-needed // 1024**3)}g"
    said = (
        f"kv.cpu_tier_bytes: Ray's object store, which holds the CPU tier, needs {_gib(needed)} of {SHARED_MEMORY}, "
        f"where {_gib(free)} are free"
    )
    if needed > _LARGEST_ON_A_DISK_BYTES and os.environ.get(_ALLOW_A_DISK) != "1":
        raise SettingsError(f"{said}; {what_works}.")
    return f"{said}, and lies on a disk now, where loading is slow. Better {what_works}."


def shared_memory_free_bytes() -> int | None:
    """What is free where Ray wants its object store; None: this system has no such place."""
    try:
        filesystem = os.statvfs(SHARED_MEMORY)
    except OSError:
        return None
    return filesystem.f_bavail * filesystem.f_frsize


def replica_bytes(settings: Settings, dtype: str) -> int:
    """Of main memory, with weights and KV of this type: on a GPU's machine they lie on the GPU."""
    ranks = settings.engine.tensor_parallel_size
    others = ranks if ranks > 1 else int(settings.engine_process == "process")
    process = _REPLICA_PROCESS_BYTES + others * _ENGINE_PROCESS_BYTES
    folder = find_model(settings.model)
    if machine.accelerator() != "cpu" or not isinstance(folder, Path):
        return process
    config = text_config(folder)
    saved = str(config.get("dtype") or config.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    used = saved if dtype == "auto" else dtype
    item = _ITEM_BYTES.get(used, 2)
    weights = _weight_bytes(folder) * item // _ITEM_BYTES.get(saved, item)
    return process + weights + _pool_tokens(settings) * _token_bytes(config, item, ranks)


def _weight_bytes(folder: Path) -> int:
    files = list(folder.glob("*.safetensors")) or [*folder.glob("*.bin"), *folder.glob("*.pt")]
    return sum(file.stat().st_size for file in files)


def _pool_tokens(settings: Settings) -> int:
    return (settings.device_blocks or 0) * settings.block_size_tokens


def _token_bytes(config: dict[str, Any], item: int, ranks: int = 1) -> int:
    """Of one token's KV over all layers; 0 where config.json does not say. Each rank has a head at least."""
    layers = int(config.get("num_hidden_layers") or 0)
    if width := latent_width(config):
        return layers * width * ranks * item
    heads = int(config.get("num_attention_heads") or 0)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    head_dim = int(config.get("head_dim") or (int(config.get("hidden_size") or 0) // heads if heads else 0))
    return 2 * layers * max(kv_heads, ranks) * head_dim * item


def _gib(nbytes: int) -> str:
    return f"{nbytes / 1024**3:.1f} GiB"
