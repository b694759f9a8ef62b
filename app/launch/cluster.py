"""How Ray is started on one machine: a cluster that no other user reaches, no dashboard, an object store that fits the
CPU tier.

A client that reaches Ray's ports, or may write its sockets, can run code here. So every port is bound to loopback, each
call carries a token that is made for this life of the server, and only this user can read Ray's files.
"""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Any

from configs.machine.cores import cores
from configs.settings import Settings

TOKEN_FILE = "ray_token"
ON_NETWORK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
"""Ray's variable for whether it is to be reached from other machines, whatever system that is."""

LOOKS_SELDOM = {
    "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
    "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",
    "LOG_NAME_UPDATE_INTERVAL_S": "1",
}
"""Environment of a Ray that leaves its cores to others: an idle server took .40 of a slow one, and .32 with these.

Unless told, Serve's controller looks over its replicas ten times a second and asks Ray's control service each time, and
the log monitor lists the folder of logs as often, while there are fewer files than the threshold.
"""

# In addition to the CPU tier, Ray's object store holds what is in flight between processes: segments on their way from
# a replica, and those that were read from Redis for a waiting request, for which the tier may have no room.
# Some 7 segments of an 8B model (256 tokens of 144 KiB) fit into the first figure; the second grows with the tier.
_STORE_HEADROOM_BYTES = 256 * 1024**2
_STORE_HEADROOM_SHARE = 0.25

_LOGICAL_MEMORY_BYTES = 1024**3

# Logical CPUs for the ingress, the tier and the manager. They mostly wait, so they may exceed the machine's cores.
_CPUS_BESIDE_REPLICAS = 2


def write_token(folder: Path) -> Path:
    """A file in `folder`, readable by this user alone, with a token that Ray's processes are to ask each other for."""
    path = folder / TOKEN_FILE
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(secrets.token_hex(32))
    return path


def ray_environment(settings: Settings, token: Path) -> dict[str, str]:
    """Environment variables for the process that starts Ray, and for all that Ray starts.

    `token` is the file that `write_token` made. Of Ray this leans on the names of the variables.
    """
    environment = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_AUTH_TOKEN": "",  # one that the user has set for another cluster would be taken first
        # Off, Ray takes 127.0.0.1 for this machine's address on any system, and binds all it starts to it.
        # `_node_ip_address="127.0.0.1"` does not: `ray.init` replaces that by the machine's address on the network.
        ON_NETWORK: "0",
        # Short of memory, Ray would end what was started last, or Serve's controller; the kernel ends the largest.
        "RAY_memory_monitor_refresh_ms": "0",
        # Unless told, `ray.init` gives its raylet 30 s to appear, which on a crowded machine it may not. One that hangs
        # takes as long, until `app.launch.ray_start` starts another.
        "RAY_raylet_start_wait_time_s": "60",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Else Ray's control service keeps the last 100,000 calls of actors, 400 MB, for a dashboard that does not run.
        "RAY_task_events_report_interval_ms": "0",
        "RAY_COLOR_PREFIX": "0",  # what processes say goes into a file
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",  # Ray's coming default; unset, it warns at every start
        # Serve kills an HTTP proxy that is not ready three times within this, 5 s unless told; `serve run` may end so.
        # (Read by ray.serve._private.constants.)
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        # The manager and the Redis tier wait, and so answer: one that leaves two questions unanswered hangs, and Serve
        # starts another. Unless told it asks every 10 s, three times, and waits for half a minute each time.
        "RAY_SERVE_DEPLOYMENT_ACTOR_HEALTH_CHECK_PERIOD_S": "1",
        "RAY_SERVE_DEPLOYMENT_ACTOR_HEALTH_CHECK_TIMEOUT_S": "2.5",
        "RAY_SERVE_DEPLOYMENT_ACTOR_HEALTH_CHECK_UNHEALTHY_THRESHOLD": "2",
        "VLLM_NO_USAGE_STATS": "1",
        **LOOKS_SELDOM,
    }
    if settings.http.log_format == "json":
        environment["RAY_DEDUP_LOGS"] = "0"  # it adds words to lines, and drops those that differ in numbers only
    if Path(settings.model_source).is_absolute():
        environment["HF_HUB_OFFLINE"] = "1"  # everything is in the model's folder
    return environment


def object_store_bytes(settings: Settings) -> int:
    """Size of Ray's object store, which holds the CPU tier and what is on its way."""
    return store_bytes(int(settings.kv.cpu_tier_bytes) if settings.kv.enabled else 0)


def store_bytes(tier_bytes: int) -> int:
    """Return the size of an object store for a CPU tier of `tier_bytes`."""
    return int(tier_bytes * (1 + _STORE_HEADROOM_SHARE)) + _STORE_HEADROOM_BYTES


def tier_bytes_within(nbytes: int) -> int:
    """Return the largest CPU tier that an object store of `nbytes` holds; below 0 where it holds none."""
    return int((nbytes - _STORE_HEADROOM_BYTES) / (1 + _STORE_HEADROOM_SHARE))


def ray_options(settings: Settings, folder: Path) -> dict[str, Any]:
    """Arguments of `ray.init` for a cluster that belongs to this server alone; `folder` is a `private_folder`."""
    needed_cpus = settings.max_replicas * settings.replica_threads + _CPUS_BESIDE_REPLICAS
    return {
        "address": "local",  # never join another cluster of this machine
        "namespace": "serve",
        "include_dashboard": False,
        "_temp_dir": str(folder / "ray"),
        "object_store_memory": object_store_bytes(settings),
        # Nothing is placed by memory, and unless told Ray refuses to start where little is free at the moment.
        "_memory": _LOGICAL_MEMORY_BYTES,
        "num_cpus": max(cores(), needed_cpus),
        # A spilled segment takes longer to read back than to recompute.
        "_system_config": {"automatic_object_spilling_enabled": False},
    }
