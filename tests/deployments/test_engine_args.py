"""Equal engines have equal identities, others do not; and the hashes that name KV are the engine's own."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from live_engine import BLOCK, LiveEngine, greedy, prompt

from configs.settings import PROJECT_ROOT, load_settings
from deployments.engine_args import engine_config, model_identity
from kvmanager.keys import ROOT_HASH, block_hashes

ENGINE: dict[str, Any] = {"device_blocks": 100}

PRINT_IDENTITY = """
import sys
from configs.settings import load_settings
from deployments.engine_args import engine_config, model_identity
from deployments.engine_host import start_engine
config = engine_config(load_settings({"model": sys.argv[1], "dtype": "float32", "engine": {"device_blocks": 100}}))
llm, _ = start_engine(config, log_stats=False)
from vllm.v1.core import kv_cache_utils
print("identity", model_identity(config).fingerprint().hex(), kv_cache_utils.NONE_HASH.hex(), flush=True)
llm.shutdown()
"""


@pytest.fixture(scope="module")
def model(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the model that a test may damage."""
    return Path(shutil.copytree(demo_model, tmp_path_factory.mktemp("changed") / "demo"))


@pytest.fixture(scope="module")
def config(model: Path) -> Any:
    return engine_config(load_settings({"model": str(model), "dtype": "float32", "engine": ENGINE}))


@pytest.mark.parametrize("place", [0.0, 0.37, 0.9999999])
def test_any_byte_of_the_weights_changes_the_identity(config: Any, model: Path, place: float) -> None:
    before = model_identity(config)
    weights = model / "model.safetensors"
    original = weights.read_bytes()
    changed = bytearray(original)
    changed[int(len(changed) * place)] ^= 1
    try:
        weights.write_bytes(changed)
        assert model_identity(config).weights != before.weights
        assert model_identity(config).fingerprint() != before.fingerprint()
    finally:
        weights.write_bytes(original)
    assert model_identity(config) == before


def test_the_models_configuration_is_part_of_the_identity(config: Any, model: Path) -> None:
    before = model_identity(config)
    file = model / "config.json"
    original = file.read_text()
    file.write_text(original.replace("10000000.0", "10000.0"))
    try:
        assert model_identity(config) != before
    finally:
        file.write_text(original)


def test_an_override_that_changes_no_file_is_part_of_the_identity(config: Any, model: Path) -> None:
    overridden = {**ENGINE, "extra_args": {"hf_overrides": {"rms_norm_eps": 1e-3}}}
    settings = load_settings({"model": str(model), "dtype": "float32", "engine": overridden})

    assert model_identity(engine_config(settings)) != model_identity(config)


def test_dtype_and_block_size_change_the_identity(config: Any, model: Path) -> None:
    identities = {model_identity(config)}
    for dtype, block in (("bfloat16", 32), ("float32", 64)):
        settings = load_settings(
            {"model": str(model), "dtype": dtype, "engine": {**ENGINE, "block_size_tokens": block}}
        )
        identities.add(model_identity(engine_config(settings)))
    assert len(identities) == 3
    assert len({identity.fingerprint() for identity in identities}) == 3


def test_another_process_with_another_hash_seed_agrees(config: Any, model: Path) -> None:
    finished = subprocess.run(
        [sys.executable, "-c", PRINT_IDENTITY, str(model)],
        cwd=PROJECT_ROOT,
        env={**os.environ, "PYTHONHASHSEED": "123"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    found = [line for line in finished.stdout.splitlines() if line.startswith("identity")]
    assert found == [f"identity {model_identity(config).fingerprint().hex()} {ROOT_HASH.hex()}"], finished.stderr


@pytest.mark.parametrize("salt", ["a", "salt of another tenant"])
def test_keys_are_the_engines_own_block_hashes(engine: LiveEngine, monkeypatch: pytest.MonkeyPatch, salt: str) -> None:
    seen: list[tuple[list[int], list[bytes]]] = []
    finished = engine.scheduler.connector.request_finished

    def watch(request: Any, block_ids: list[int]) -> Any:
        seen.append((list(request.all_token_ids), list(request.block_hashes)))
        return finished(request, block_ids)

    monkeypatch.setattr(engine.scheduler.connector, "request_finished", watch)
    monkeypatch.setattr(engine, "salt", salt)
    engine.run(engine.answer(prompt(300, 100), greedy(40), planned=False))

    tokens, hashes = seen[0]
    assert len(tokens) == 140
    assert hashes == block_hashes(tokens, BLOCK, salt)
