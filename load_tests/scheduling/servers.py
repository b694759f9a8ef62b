"""The server of an arm: crosskv as it is shipped, with one replica of few run slots."""

from __future__ import annotations

import contextlib
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import yaml
from prometheus_client.parser import text_string_to_metric_families

from app.launch.ports import free_port
from configs.model_folder import PROJECT_ROOT
from load_tests.bench.servers import BenchServer, running
from load_tests.measuring.processes import wait_until_quiet

SLOTS = 4
DEVICE_BLOCKS = 110
"""Less than two in three of what four long jobs and what waits would fill: preempted KV is overwritten."""
MAX_MODEL_LEN = 3_072
SHORTEST, MLFQ, FCFS = "shortest", "mlfq", "fcfs"


@contextlib.contextmanager
def server(model: str, engine: dict[str, Any], start_s: float, log: Path) -> Iterator[BenchServer]:
    """Started, quiet, and ended on leaving. Raises ServerError."""
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="crosskv-") as scratch:
        config = yaml.safe_load((PROJECT_ROOT / "serve_config.yaml").read_text(encoding="utf-8"))
        args = config["applications"][0]["args"]
        args |= {"model": model, "dtype": "float32", "replicas": 1, "max_model_len": MAX_MODEL_LEN}
        args["engine"] |= {"max_num_seqs": SLOTS, "device_blocks": DEVICE_BLOCKS, **engine}
        # All that is stored is loaded, although so small a model would be computed sooner: that is what is measured.
        args["kv"] |= {"redis_url": None, "load_or_recompute": "load"}
        path = Path(scratch) / "serve_config.yaml"
        path.write_text(yaml.safe_dump(config), encoding="utf-8")
        command = [sys.executable, "-m", "app.launch", str(path), "--port", str(port)]
        with running(command, f"http://127.0.0.1:{port}", Path(model).name, log, start_s) as found:
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
