"""Of KV's last bits the kind of processor decides: each has names of its own, and only one kind is shared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from configs import machine
from configs.settings import Settings, load_settings
from deployments.engine.engine_args import engine_config
from deployments.engine.model_identity import model_identity, why_apart
from kvmanager.segments.keys import ModelIdentity

ENGINE = {"device_blocks": 40, "max_num_batched_tokens": 512}

KINDS = ("vec, AVX512", "vec, AVX2", "vec, DEFAULT", "amx, AVX512", "neon, DEFAULT", "neon, SVE")


def settings(model: Path, kv: dict[str, Any]) -> Settings:
    return load_settings({"model": str(model), "dtype": "float32", "engine": ENGINE, "kv": kv})


def identity(model: Path, kv: dict[str, Any]) -> ModelIdentity:
    loaded = settings(model, kv)
    return model_identity(engine_config(loaded), loaded)


def test_each_kind_of_processor_has_a_fingerprint_of_its_own_and_one_has_that_of_before(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_machine(arch: str, kind: str | None) -> bytes:
        monkeypatch.setattr("platform.machine", lambda: arch)
        return identity(demo_model, {} if kind is None else {"processor": kind}).fingerprint()

    monkeypatch.setattr(machine, "accelerator", lambda: "cpu")
    of_kinds = {kind: of_machine("aarch64" if kind.startswith("neon") else "x86_64", kind) for kind in KINDS}
    assert len(set(of_kinds.values())) == len(KINDS)
    assert "vec" not in identity(demo_model, {"processor": "vec, AVX512"}).computation, "what was stored before is read"
    monkeypatch.setattr(machine, "processor_kind", lambda dtype: "vec, AVX2")
    assert of_machine("x86_64", None) == of_kinds["vec, AVX2"], "the machine's own, where nobody has chosen"
    monkeypatch.setattr(machine, "accelerator", lambda: "cuda")
    assert of_machine("x86_64", None) == of_machine("x86_64", "vec, AVX2"), "there it decides nothing"


@pytest.mark.usefixtures("own_machine")
def test_the_kind_of_this_machine_is_what_vllm_and_torch_compute_with_contract() -> None:
    torch, cpu_attn = pytest.importorskip("torch"), pytest.importorskip("vllm.v1.attention.backends.cpu_attn")
    for dtype in ("float32", "bfloat16"):
        isa, capability = machine.processor_kind(dtype).split(", ")
        assert isa == cpu_attn._get_attn_isa(getattr(torch, dtype), 32, 64)
        assert capability == torch.backends.cpu.get_cpu_capability()


def test_an_engine_on_another_kind_of_processor_keeps_a_cache_of_its_own(
    demo_model: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(machine, "accelerator", lambda: "cpu")
    loaded = settings(demo_model, {"processor": "vec, AVX2"})
    config = engine_config(loaded)
    assert config.kv_transfer_config is None
    assert config.cache_config.enable_prefix_caching
    why = why_apart(loaded)
    assert why is not None
    assert "'vec, AVX512'" in why
    assert "'vec, AVX2'" in why
    assert why in caplog.text
    monkeypatch.setattr(machine, "processor_kind", lambda dtype: "vec, AVX2")
    assert why_apart(loaded) is None
    assert engine_config(loaded).kv_transfer_config is not None
