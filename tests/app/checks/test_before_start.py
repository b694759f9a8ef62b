"""Everything is looked at in order, and what is wrong is told before Ray is there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from app.checks.before_start import checks_of, require_startable
from configs.settings import SettingsError, load_settings
from tests.model_files import write_json, write_model

BREAKS: dict[str, Callable[[Path], Any]] = {
    "model": lambda folder: (folder / "model.safetensors").write_bytes(b""),
    "chat_template": lambda folder: write_json(folder / "tokenizer_config.json", {}),
}
SETTINGS: dict[str, dict[str, Any]] = {
    "engine": {"engine": {"tool_call_parser": "hermess"}},
    "kv.eviction_policy": {"kv": {"eviction_policy": "lfuu"}},
    "kv.redis_url": {"kv": {"redis_url": "http://redis"}},
}


@pytest.mark.parametrize("part", [*BREAKS, *SETTINGS])
def test_whatever_is_wrong_is_refused_by_the_part_that_looks_at_it(tmp_path: Path, part: str) -> None:
    folder = write_model(tmp_path / "model")
    settings = load_settings({"model": str(folder), **SETTINGS.get(part, {})})
    BREAKS.get(part, lambda folder: None)(folder)
    refused = []
    for check in checks_of(settings):
        try:
            assert check.look().words
        except SettingsError as error:
            refused.append((check.part, str(error).startswith(part)))
    assert refused == [(part, True)]
    with pytest.raises(SettingsError, match=part):
        require_startable(settings)


def test_a_hubs_model_is_looked_at_when_it_is_loaded() -> None:
    settings = load_settings({"model": "Qwen/Qwen3-8B"})
    assert "hub" in checks_of(settings)[0].look().words
    require_startable(settings)


@pytest.mark.parametrize(
    "url", ["", "http://x", "redis.example.org:6379", "localhost", "redis://[", "redis://h:x", "redis://h:99999/0"]
)
def test_what_is_no_url_of_a_redis_is_refused_though_none_is_required(model_folder: Path, url: str) -> None:
    with pytest.raises(SettingsError, match=r"^kv\.redis_url: .*redis://") as refused:
        require_startable(load_settings({"model": str(model_folder), "kv": {"redis_url": url}}))
    assert len(str(refused.value)) <= 400


@pytest.mark.parametrize("url", ["redis://127.0.0.1:1/0", "rediss://127.0.0.1:1/0", "unix:///no/such/socket"])
def test_a_redis_that_cannot_be_reached_is_told_and_refused_where_it_is_required(model_folder: Path, url: str) -> None:
    args = {"model": str(model_folder), "kv": {"redis_url": url}}
    (said,) = [check.look() for check in checks_of(load_settings(args)) if check.part == "kv.redis_url"]
    assert not said.well
    assert said.words.startswith("kv.redis_url: no Redis can be reached")
    args["kv"] = {"redis_url": url, "redis_required": True}
    with pytest.raises(SettingsError, match=r"^kv\.redis_required: no Redis can be reached"):
        require_startable(load_settings(args))


@pytest.mark.parametrize("model", ["Qwen3-8B", "qwen3-9b", "gpt2"])
def test_a_name_without_an_owner_is_no_hub_id(model: str) -> None:
    with pytest.raises(SettingsError, match=r"^model: there is no folder .*with its owner, such as") as refused:
        load_settings({"model": model})
    assert ("MODEL=qwen3-8b" in str(refused.value)) == model.lower().startswith("qwen")
