"""How Ray is started on one machine: a cluster of its own, no dashboard, an object store that fits the CPU tier."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from configs.settings import Settings

# Ray's object store also holds what is in flight between processes, beside what the CPU tier keeps: segments on their
# way from a replica, and those that were read from Redis for a waiting request, for which the tier may have no room.
# Some 7 segments of an 8B model (256 tokens of 144 KiB) fit into the first figure; the second grows with the tier.
_STORE_HEADROOM_BYTES = 256 * 1024**2
_STORE_HEADROOM_SHARE = 0.25

# Logical CPUs for the ingress, the tier and the manager. They mostly wait, so they may exceed the machine's cores.
_CPUS_BESIDE_REPLICAS = 2


def ray_environment(settings: Settings) -> dict[str, str]:
    """Environment variables for the process that starts Ray, and for all that Ray starts."""
    environment = {
        "RAY_AUTH_MODE": "disabled",  # a local `ray.init` may switch token auth on: say what is meant
        # Short of memory, Ray would end what was started last, or Serve's controller; the kernel ends the largest.
        "RAY_memory_monitor_refresh_ms": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray's coming default; unset, it warns at every start
        # Serve kills an HTTP proxy that is not ready three times within this, 5 s unless told; `serve run` may end so.
        # (Read by ray.serve._private.constants, ray 2.60.)
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        "VLLM_NO_USAGE_STATS": "1",
    }
    if Path(settings.model_source).is_absolute():
        environment["HF_HUB_OFFLINE"] = "1"  # everything is in the model's folder
    return environment


def object_store_bytes(settings: Settings) -> int:
    """Size of Ray's object store, which holds the CPU tier and what is on its way."""
    tier_bytes = int(settings.kv.cpu_tier_bytes) if settings.kv.enabled else 0
    return int(tier_bytes * (1 + _STORE_HEADROOM_SHARE)) + _STORE_HEADROOM_BYTES


def ray_options(settings: Settings) -> dict[str, Any]:
    """Arguments of `ray.init` for a cluster that belongs to this server alone."""
    needed_cpus = settings.replicas * settings.engine.threads + _CPUS_BESIDE_REPLICAS
    return {
        "address": "local",  # never join another cluster of this machine
        "namespace": "serve",
        "include_dashboard": False,
        "object_store_memory": object_store_bytes(settings),
        "num_cpus": max(os.cpu_count() or 1, needed_cpus),
        # A spilled segment takes longer to read back than to recompute.
        "_system_config": {"automatic_object_spilling_enabled": False},
    }
