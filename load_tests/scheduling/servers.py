"""The server of an arm: crosskv as it is shipped, with one replica of few run slots."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from app.launch.ports import free_port
from load_tests.harness.server import ServerProcess, answering, launch_command, running, write_config
from load_tests.measuring.processes import wait_until_quiet

SLOTS = 4
DEVICE_BLOCKS = 110
"""Less than two in three of what four long jobs and what waits would fill: preempted KV is overwritten."""
MAX_MODEL_LEN = 3_072
SHORTEST, MLFQ, FCFS = "shortest", "mlfq", "fcfs"


@contextlib.contextmanager
def server(model: str, engine: dict[str, Any], start_s: float, log: Path) -> Iterator[ServerProcess]:
    """Started, quiet, and ended on leaving. Raises ServerError."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="crosskv-") as scratch:
        settings = {
            "model": model,
            "dtype": "float32",
            "replicas": 1,
            "max_model_len": MAX_MODEL_LEN,
            "engine": {"max_num_seqs": SLOTS, "device_blocks": DEVICE_BLOCKS, **engine},
            # All that is stored is loaded, although a model this small is computed sooner: loading is what is measured.
            "kv": {"redis_url": None, "load_or_recompute": "load"},
        }
        command = launch_command(write_config(Path(scratch), settings, ("engine", "kv")), port)
        url = f"http://127.0.0.1:{port}"
        with running(command, url, answering(url, Path(model).name), log, start_s) as found:
            wait_until_quiet(found.process)
            yield found


def counted(url: str) -> dict[str, float]:
    """What scheduling has counted: samples of /metrics by name, and label values where there are any."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics", timeout=20).text)
    found: dict[str, float] = {}
    for family in families:
        for sample in family.samples:
            if sample.name.startswith(("crosskv_preempt", "crosskv_scheduler", "crosskv_step", "crosskv_brought")):
                labels = {name: value for name, value in sample.labels.items() if name in ("why", "outcome", "level")}
                key = ".".join([sample.name, *labels.values()])
                found[key] = found.get(key, 0.0) + sample.value
    return found


def forget(url: str) -> None:
    """Empty the device and the CPU tier: each load finds nothing of the one before."""
    httpx.post(f"{url}/api/v1/kv/clear", json={"tiers": ["device", "cpu"]}, timeout=60).raise_for_status()
