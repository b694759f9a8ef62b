"""A server that this machine has no memory for is refused before anything starts."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from app.launch import memory
from app.launch.memory import check_memory, shared_memory_warning
from configs import machine
from configs.settings import Settings, SettingsError, load_settings

pytestmark = pytest.mark.usefixtures("each_processor")

GIB = 1024**3
CONFIG = {
    "model_type": "llama",
    "max_position_embeddings": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
    "dtype": "bfloat16",
}


@pytest.fixture(autouse=True)
def roomy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine of 24 GiB with all of it in /dev/shm."""
    machine_of(monkeypatch, memory_gib=24, shared_gib=24)


def machine_of(monkeypatch: pytest.MonkeyPatch, memory_gib: float, shared_gib: float) -> None:
    monkeypatch.setattr(machine, "memory_bytes", lambda: int(memory_gib * GIB))
    free = SimpleNamespace(f_bavail=int(shared_gib * GIB) // 4096, f_frsize=4096)
    monkeypatch.setattr(os, "statvfs", lambda path: free)


def settings(folder: Path, weights_gib: float = 0.0, **args: Any) -> Settings:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(int(weights_gib * GIB))  # sparse: takes no room
    return load_settings({"model": str(folder), **args})


def test_a_small_model_fits(tmp_path: Path) -> None:
    check_memory(settings(tmp_path))


@pytest.mark.parametrize(
    ("weights_gib", "args"),
    [
        (8.0, {"replicas": 3}),  # 3 copies of the weights
        (8.0, {"dtype": "float32"}),  # twice its files' size
        (1.0, {"engine": {"device_blocks": 3000}}),  # 128 KiB a token: 11.7 GiB of KV per replica
        (8.0, {"kv": {"redis_bytes": 10 * GIB}}),
        (8.0, {"kv": {"cpu_tier_bytes": 8 * GIB}}),
    ],
    ids=["replicas", "dtype", "pool", "redis", "cpu tier"],
)
def test_whatever_exceeds_the_machine_is_named_with_its_share(
    tmp_path: Path, weights_gib: float, args: dict[str, Any]
) -> None:
    with pytest.raises(SettingsError, match=r"needs about .* this machine has 24\.0 GiB.*lower replicas") as refused:
        check_memory(settings(tmp_path, weights_gib, **args))
    assert f"{args.get('replicas', 2)} replicas of" in str(refused.value)


def test_without_sharing_neither_tier_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = settings(tmp_path, kv={"enabled": False})
    needed = 2 * memory.replica_bytes(alone, alone.engine_dtype) + memory.BESIDE_REPLICAS_BYTES
    machine_of(monkeypatch, memory_gib=needed / GIB + 0.5, shared_gib=24)  # Ray itself takes a little
    check_memory(alone)
    for tiers in ({"cpu_tier_bytes": GIB, "redis_url": None}, {"cpu_tier_bytes": 0, "redis_bytes": GIB}):
        with pytest.raises(SettingsError):
            check_memory(settings(tmp_path, kv=tiers))


def test_kv_and_weights_count_as_the_type_that_the_processor_computes(tmp_path: Path, each_processor: str) -> None:
    per_value = {"float32": 4, "bfloat16": 2}[each_processor]
    auto = settings(tmp_path, weights_gib=1.0, engine={"device_blocks": 256})
    pool = 256 * 32 * 2 * 32 * 8 * 128 * per_value  # blocks, tokens, K and V, layers, heads, head size
    weights = GIB * per_value // 2  # the files hold bfloat16
    assert memory.replica_bytes(auto, auto.engine_dtype) == memory._REPLICA_PROCESS_BYTES + weights + pool


def test_on_a_gpus_machine_weights_and_pool_do_not_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = settings(tmp_path, 60.0)
    with pytest.raises(SettingsError):
        check_memory(large)
    monkeypatch.setattr(machine, "accelerator", lambda: "cuda")
    check_memory(large)


def test_an_object_store_beyond_shared_memory_is_named_with_what_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shared_memory_warning(settings(tmp_path)) is None
    machine_of(monkeypatch, memory_gib=24, shared_gib=1 / 16)  # what Docker gives unasked
    said = shared_memory_warning(settings(tmp_path))
    assert said is not None
    assert re.search(r"kv\.cpu_tier_bytes.*needs 1\.5 GiB.*0\.1 GiB are free.*--shm-size=2g", said)


def test_one_that_ray_puts_on_no_disk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = settings(tmp_path, kv={"cpu_tier_bytes": 9 * GIB})
    machine_of(monkeypatch, memory_gib=24, shared_gib=8)
    with pytest.raises(SettingsError, match=r"needs 11\.5 GiB .*; lower kv\.cpu_tier_bytes"):
        shared_memory_warning(large)
    monkeypatch.setenv("RAY_OBJECT_STORE_ALLOW_SLOW_STORAGE", "1")
    assert shared_memory_warning(large) is not None


def test_a_restart_counts_what_the_running_server_gives_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    running = settings(tmp_path)
    machine_of(monkeypatch, memory_gib=24, shared_gib=0.5)
    assert shared_memory_warning(running) is not None
    assert shared_memory_warning(running, running) is None


def test_the_shipped_models_token_is_counted_as_vllm_does() -> None:
    config = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    assert memory._token_bytes(config, 4) == 2 * 2 * 2 * 32 * 4
    assert memory._token_bytes({"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 256}, 2) == 2048
    assert memory._token_bytes({}, 2) == 0
    latents = {**config, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert memory._token_bytes(latents, 2) == 2 * 576 * 2
    assert memory._token_bytes(latents, 2, ranks=2) == 2 * 2 * 576 * 2, "each rank has them all"


def test_an_engine_in_a_process_of_its_own_needs_more() -> None:
    thread, process = (
        memory.replica_bytes(load_settings({"engine": {"process": mode}}), "float32") for mode in ("thread", "process")
    )
    assert process - thread == memory._ENGINE_PROCESS_BYTES
