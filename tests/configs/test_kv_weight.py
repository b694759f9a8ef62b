"""What a model's KV weighs is counted from its configuration, and says the same in its preset and on the page."""

from __future__ import annotations

import pytest

from configs.model_folder import PROJECT_ROOT
from configs.presets import PRESETS, preset_names
from tests.configs.kv_weight import WEIGHTS, weight_row

KIB, MIB = 1 << 10, 1 << 20


@pytest.mark.parametrize(
    ("name", "dense", "stored", "landing", "in_float32"),
    [
        # By hand, from the configurations: bytes of a token, of all its layers, of a landing.
        ("gpt-oss-20b", 12 * 2 * 512 * 2, 24 * 2 * 512 * 2, 12 * 2048 * 128, 12 * 2048 * 128),
        ("gemma-3-27b-it", 10 * 8192, 62 * 8192, 52 * 8192 * 1024, 52 * 8192 * 1024),
        (
            "qwen3-next-80b-a3b-instruct",
            12 * 2 * 512 * 2,
            12 * 2 * 512 * 2,
            36 * (MIB + 49_152),
            36 * (2 * MIB + 49_152),
        ),
        ("nemotron-h-8b-base-8k", 16 * KIB, 16 * KIB, 24 * (2 * MIB + 61_440), 24 * (4 * MIB + 61_440)),
    ],
)
def test_bytes_follow_from_a_models_configuration(
    name: str, dense: int, stored: int, landing: int, in_float32: int
) -> None:
    weight = WEIGHTS[name]
    assert (weight.dense_token_bytes, weight.stored_token_bytes) == (dense, stored)
    assert (weight.landing_bytes(), weight.landing_bytes(4)) == (landing, in_float32)


@pytest.mark.parametrize("name", WEIGHTS)
def test_a_preset_and_the_page_say_what_is_counted(name: str) -> None:
    assert name in preset_names()
    weight, preset = WEIGHTS[name], (PRESETS / f"{name}.yaml").read_text(encoding="utf-8")
    said = " ".join(line.removeprefix("# ") for line in preset.splitlines() if line.startswith("#"))
    assert f"{weight.dense_token_bytes // KIB} KiB of KV per token" in said
    assert f"{weight.landing_bytes() / MIB:.0f} MiB for the" in said
    if weight.states is None:
        assert f"the tiers hold {weight.stored_token_bytes // KIB} KiB per token" in said
    else:
        assert f"({weight.landing_bytes(4) / MIB:.0f} MiB in float32)" in said
    page = (PROJECT_ROOT / "docs" / "concepts" / "models.md").read_text(encoding="utf-8")
    assert weight_row(name) in page.splitlines()
