"""What is compared: for each arm a title, the command that starts its server, and whether this machine can run it.

All arms have the same model, engine settings, device KV budget and number of replicas.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from configs import machine
from load_tests.harness.server import launch_command, write_config
from load_tests.peers.engine import Connector, Peer, kv_block_bytes
from load_tests.peers.serve_llm import missing_packages
from load_tests.workloads.chunks import NAME as REARRANGED

BASE = "serve-llm"
"""The arm that ratios are to: what a user of Ray would take."""
EXACT = "crosskv"
BLENDED = "crosskv-blended"
Kind = Literal["exact", "compressed", "blended"]
"""Of a crosskv arm."""
BLENDING = {"separators": ["<|im_start|>"], "fill": "first"}
"""`blending` of the blended arm: a chunk is a message as the models' template writes it, and is stored when it first
comes, for no replica is idle while a workload runs."""
OFFLOAD_GIB = 1.0
"""Host memory per replica of vLLM's OffloadingConnector and of LMCache; crosskv's CPU tier has as much for all."""


@dataclass(frozen=True)
class Arm:
    """`command(peer, folder)` starts the server; it may write files into `folder`. `unfit` says why it cannot run.

    `body` goes into every request. The arm is measured on the workloads of which `takes` says so.
    """

    name: str
    title: str
    command: Callable[[Peer, Path, int], list[str]]
    unfit: Callable[[], str | None] = lambda: None
    is_crosskv: bool = False
    body: Mapping[str, Any] = field(default_factory=dict)
    takes: Callable[[str], bool] = lambda workload: True


def crosskv_settings(peer: Peer, folder: Path, kind: Kind) -> dict[str, Any]:
    """`args:` of serve_config.yaml over the shipped ones.

    `compressed`: prompts of fidelity `tolerant`, and a CPU tier as large as the device pools together, so that
    much of a larger working set comes from Redis, where CacheGen's codec has made it small. Not less: KV reaches
    Redis by way of the CPU tier, which has to hold whatever is being computed.
    `blended`: see `BLENDING`; it is the requests that ask for it.
    """
    kv: dict[str, Any] = {"redis_folder": str(folder / "redis")}
    if kind == "compressed":
        settings = peer.settings()
        pools_bytes = peer.replicas * peer.device_blocks * kv_block_bytes(settings)
        kv |= {"fidelity": "tolerant", "cpu_tier_bytes": pools_bytes}
    return {
        "model": peer.model,
        "dtype": peer.dtype,
        "replicas": peer.replicas,
        "max_model_len": peer.max_model_len,
        "engine": {"device_blocks": peer.device_blocks},
        "kv": kv,
        **({"blending": BLENDING} if kind == "blended" else {}),
    }


def _crosskv(kind: Kind) -> Callable[[Peer, Path, int], list[str]]:
    def command(peer: Peer, folder: Path, metrics_port: int) -> list[str]:
        del metrics_port  # every answer says which replica gave it
        config = write_config(folder, crosskv_settings(peer, folder, kind), ("engine", "kv"))
        return launch_command(config, peer.port)

    return command


def _peer(module: str, *options: str) -> Callable[[Peer, Path, int], list[str]]:
    def command(peer: Peer, folder: Path, metrics_port: int) -> list[str]:
        del folder
        sizes = {
            "--model": peer.model,
            "--port": peer.port,
            "--replicas": peer.replicas,
            "--device-blocks": peer.device_blocks,
            "--max-model-len": peer.max_model_len,
            "--dtype": peer.dtype,
            "--metrics-port": metrics_port,
        }
        words = [str(word) for pair in sizes.items() for word in pair]
        return [sys.executable, "-m", f"load_tests.peers.{module}", *words, *options]

    return command


def _serve_llm_unfit() -> str | None:
    missing = missing_packages()
    return f"it needs {' and '.join(missing)}: run `make bench`, which installs them" if missing else None


def _offloading_unfit() -> str | None:
    return "vLLM's OffloadingConnector refuses the CPU backend" if machine.accelerator() == "cpu" else None


def _lmcache_unfit() -> str | None:
    if machine.accelerator() == "cpu":
        return "LMCache has no connector for vLLM's CPU backend"
    if importlib.util.find_spec("lmcache") is None:
        return "it needs lmcache, which is not among this project's packages: .venv/bin/python -m pip install lmcache"
    return None


def _with_offload(connector: Connector) -> Callable[[Peer, Path, int], list[str]]:
    return _peer("plain_serve", "--connector", connector, "--offload-gib", str(OFFLOAD_GIB))


ARMS = {
    arm.name: arm
    for arm in (
        Arm("plain", "plain vLLM, Serve's default router", _peer("plain_serve")),
        Arm(BASE, "Ray Serve LLM, PrefixCacheAffinityRouter", _peer("serve_llm"), _serve_llm_unfit),
        Arm(EXACT, "crosskv, exact", _crosskv("exact"), is_crosskv=True),
        Arm(
            "crosskv-compressed", "crosskv, compressed Redis", _crosskv("compressed"), is_crosskv=True,
            takes=lambda workload: workload != REARRANGED,
        ),
        Arm(
            BLENDED, "crosskv, blended", _crosskv("blended"), is_crosskv=True,
            body={"kv_cache": {"fidelity": "blended"}}, takes=lambda workload: workload == REARRANGED,
        ),
        Arm("offloading", "plain vLLM with its OffloadingConnector", _with_offload("offloading"), _offloading_unfit),
        Arm("lmcache", "plain vLLM with LMCache", _with_offload("lmcache"), _lmcache_unfit),
    )
}  # fmt: skip
