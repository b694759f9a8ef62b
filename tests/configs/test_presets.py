"""The presets of configs/models: each is a valid fragment of `args:`."""

from __future__ import annotations

import pytest

from configs import machine
from configs.presets import find_preset, preset_names
from configs.settings import load_settings
from tests.configs.kv_weight import WEIGHTS

pytestmark = pytest.mark.usefixtures("each_processor")


def machines(name: str) -> tuple[str, ...]:
    """The accelerators that a preset is meant for."""
    preset = find_preset(name) or {}
    return ("cpu", "cuda") if preset.get("engine", {}).get("enforce_eager", True) else ("cuda",)


@pytest.mark.parametrize(("name", "accelerator"), [(name, one) for name in preset_names() for one in machines(name)])
def test_a_preset_is_valid_where_it_is_meant_to_run(
    name: str, accelerator: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    preset = find_preset(name)
    assert preset is not None
    monkeypatch.setattr(machine, "accelerator", lambda: accelerator)
    monkeypatch.setattr(machine, "memory_bytes", lambda: 64 * 1024**3)
    assert load_settings(preset).model.partition("/")[2].lower() == name


def test_models_of_plain_attention_and_of_windows_and_states_have_presets() -> None:
    assert {"qwen2.5-0.5b-instruct", "qwen3-8b", "llama-3.1-8b-instruct", *WEIGHTS} <= set(preset_names())


def test_a_preset_is_found_in_any_case_and_nothing_else_is() -> None:
    assert find_preset("Qwen3-8B") == find_preset("qwen3-8b")
    assert find_preset("Qwen/Qwen3-8B") is None
    assert find_preset("models/demo") is None
