"""The engine settings of a peer: those that a crosskv server of the same size has, and vLLM's own prefix caching.

What crosskv's connector needs and a peer does not is left at vLLM's default: asynchronous scheduling, and the engine's
own processes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from configs import machine
from configs.settings import Settings, SettingsError, load_settings
from deployments.engine.engine_args import engine_environment

Dtype = Literal["auto", "bfloat16", "float16", "float32"]
Connector = Literal["offloading", "lmcache"]
"""What can keep a plain replica's evicted KV: vLLM's own connector, or LMCache's, within the replica's process."""

GIB = 1024**3

_CROSSKV_ONLY = ("VLLM_ENABLE_V1_MULTIPROCESSING", "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES")
_DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class Peer:
    """What a peer serves and how large it is: `device_blocks` KV blocks per replica, `max_model_len` tokens."""

    model: str
    port: int
    replicas: int
    device_blocks: int
    max_model_len: int
    dtype: Dtype = "auto"

    def settings(self) -> Settings:
        """crosskv's settings of the same engine. Raises SettingsError, one sentence."""
        return load_settings(
            {
                "model": self.model,
                "dtype": self.dtype,
                "replicas": self.replicas,
                "max_model_len": self.max_model_len,
                "engine": {"device_blocks": self.device_blocks},
                "kv": {"enabled": False},
            }
        )


@dataclass(frozen=True)
class Offload:
    """Host memory of a replica where `connector` keeps evicted KV. CUDA only."""

    connector: Connector
    gib: float

    def transfer_config(self) -> dict[str, Any]:
        """vLLM's `kv_transfer_config`."""
        if self.connector == "lmcache":
            return {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": {"cpu_bytes_to_use": int(self.gib * GIB)},
        }

    def environment(self) -> dict[str, str]:
        """LMCache's settings (docs.lmcache.ai, configurations); vLLM's own connector has none here."""
        if self.connector == "lmcache":
            return {"LMCACHE_LOCAL_CPU": "True", "LMCACHE_MAX_LOCAL_CPU_SIZE": str(self.gib)}
        return {}


def engine_arguments(settings: Settings, offload: Offload | None = None) -> dict[str, Any]:
    """vLLM's AsyncEngineArgs and FrontendArgs by name, without the model's.

    Raises SettingsError for an `offload` where the backend has none.
    """
    arguments: dict[str, Any] = {
        "dtype": settings.engine_dtype,
        "max_model_len": settings.max_model_len,
        "block_size": settings.block_size_tokens,
        "num_gpu_blocks_override": settings.device_blocks,
        "max_num_seqs": settings.engine.max_num_seqs,
        "max_num_batched_tokens": settings.max_num_batched_tokens,
        "enforce_eager": settings.engine.enforce_eager,
        "enable_prefix_caching": True,
        "enable_prompt_tokens_details": True,
    }
    if machine.accelerator() == "cpu":
        # Else the CPU backend reserves a share of the whole machine's memory, once per replica.
        arguments["kv_cache_memory_bytes"] = (settings.device_blocks or 0) * kv_block_bytes(settings)
    if offload is not None:
        transfer = offload.transfer_config()
        if machine.accelerator() == "cpu":
            raise SettingsError(f"{transfer['kv_connector']} refuses vLLM's CPU backend; run this peer on CUDA.")
        arguments["kv_transfer_config"] = transfer
    return arguments


def kv_block_bytes(settings: Settings) -> int:
    """Bytes of one KV block of all layers, from the model folder's config.json."""
    config = json.loads((Path(settings.model_source) / "config.json").read_text(encoding="utf-8"))
    dtype = settings.engine_dtype
    if dtype == "auto":
        dtype = config.get("dtype") or config.get("torch_dtype") or "float32"
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    per_token = 2 * config.get("num_key_value_heads", heads) * head_dim * _DTYPE_BYTES[dtype]
    return int(config["num_hidden_layers"] * per_token * settings.block_size_tokens)


def peer_environment(settings: Settings) -> Mapping[str, str]:
    """What must be in the environment of a peer's replicas before they import vLLM."""
    return {name: value for name, value in engine_environment(settings).items() if name not in _CROSSKV_ONLY}
