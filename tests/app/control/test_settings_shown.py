"""GET /api/v1/settings: what is in effect, and nothing secret."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from app.control.settings_shown import ModelShape, settings_shown, shape_of_kv
from configs import machine
from configs.model_folder import find_model, kv_shape, own_max_tokens
from configs.settings import load_settings

pytestmark = pytest.mark.usefixtures("each_processor")

SECRET = "aSecretThatNobodyElseMayKnow"
SHAPE = ModelShape(layers=6, kv_bytes_per_token=3072, longest_request_tokens=4096)


def test_nothing_secret_is_shown() -> None:
    settings = load_settings(
        {
            "kv": {"redis_url": f"redis://:{SECRET}@127.0.0.1:6379/0"},
            "http": {
                "api_keys": {f"{SECRET}1": {"tenant": "acme", "admin": True}},
                "metrics_key": f"{SECRET}2",
                "otlp_endpoint": f"http://crosskv:{SECRET}@collector:4318/v1/traces",
            },
            "engine": {"extra_args": {"hf_token": SECRET, "max_logprobs": 5}},
        }
    )
    shown = settings_shown(settings, SHAPE)
    assert SECRET not in json.dumps(shown)
    assert shown["in_effect"]["redis"] == "external"
    assert shown["settings"]["engine"]["extra_args"] == ["hf_token", "max_logprobs"]


def test_empty_settings_are_shown_as_what_they_come_to(monkeypatch: Any) -> None:
    monkeypatch.setattr(machine, "accelerator", lambda: "cpu")
    monkeypatch.setattr(machine, "cpu_dtype", lambda: "float32")
    shown = settings_shown(load_settings({"replicas": {"min": 1, "max": 3}}), SHAPE)
    assert shown["settings"]["dtype"] == "auto"
    effect = shown["in_effect"]
    assert (effect["dtype"], effect["block_size_tokens"], effect["device_blocks"]) == ("float32", 32, 256)
    assert (effect["replicas"], effect["redis"], effect["layers_per_group"]) == (3, "embedded", 1)
    assert shown["model"] == {"layers": 6, "kv_bytes_per_token": 3072, "longest_request_tokens": 4096}
    assert settings_shown(load_settings({"kv": {"redis_url": None}}), None)["in_effect"]["redis"] is None


def test_a_running_ingress_says_the_same_as_its_settings_file(start: Any) -> None:
    server = start()
    with server.http() as client:
        answer = client.get("/api/v1/settings")
    assert answer.status_code == 200
    settings = load_settings({"max_model_len": 512, "dtype": "bfloat16"})
    model = find_model(settings.model)
    shape, longest = kv_shape(model), own_max_tokens(model)
    assert shape is not None
    assert longest is not None
    of_file = shape_of_kv(*shape, settings, longest)
    assert answer.json()["model"] == {"layers": 6, "kv_bytes_per_token": 3072, "longest_request_tokens": 512}
    assert of_file == ModelShape(6, 3072, 512)


def test_a_models_shape_is_read_where_its_config_says_it(tmp_path: Path) -> None:
    def shape(**config: Any) -> tuple[int, int] | None:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return kv_shape(tmp_path)

    heads = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 512}
    assert shape(**heads) == (4, 2 * 4 * 8 * 64)
    assert shape(**heads, num_key_value_heads=2, head_dim=32) == (4, 2 * 4 * 2 * 32)
    assert shape(text_config=heads) == (4, 2 * 4 * 8 * 64)
    assert shape(num_hidden_layers=4) is None
    assert shape(**heads, kv_lora_rank=512, qk_rope_head_dim=64) == (4, 4 * 576)
    assert kv_shape("Qwen/Qwen2.5-0.5B-Instruct") is None
    auto = load_settings({}).model_copy(update={"dtype": "bfloat16"})
    assert shape_of_kv(4, 100, auto, 4096) == ModelShape(4, 200, 4096)
