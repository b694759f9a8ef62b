"""The presets of configs/models: each is a valid fragment of `args:`."""

from __future__ import annotations

import pytest

from configs import machine
from configs.presets import find_preset, preset_names
from configs.settings import load_settings


@pytest.mark.parametrize("name", preset_names())
@pytest.mark.parametrize("accelerator", ["cpu", "cuda"])
def test_a_preset_is_valid_where_it_is_meant_to_run(
    name: str, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    preset = find_preset(name)
    assert preset is not None
    if accelerator == "cpu" and not preset.get("engine", {}).get("enforce_eager", True):
        pytest.skip("a preset for GPUs")
    monkeypatch.setattr(machine, "accelerator", lambda: accelerator)
    monkeypatch.setattr(machine, "memory_bytes", lambda: 64 * 1024**3)
    assert load_settings(preset).model.partition("/")[2].lower() == name


def test_the_three_models_have_presets() -> None:
    assert {"qwen2.5-0.5b-instruct", "qwen3-8b", "llama-3.1-8b-instruct"} <= set(preset_names())


def test_a_preset_is_found_in_any_case_and_nothing_else_is() -> None:
    assert find_preset("Qwen3-8B") == find_preset("qwen3-8b")
    assert find_preset("Qwen/Qwen3-8B") is None
    assert find_preset("models/demo") is None
