"""Names that vLLM has to know are compared with its source; the source says what its registries say."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, get_args

import pytest
from vllm.config.cache import CacheDType
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
from vllm.model_executor.model_loader import LoadFormats
from vllm.model_executor.models import registry
from vllm.reasoning import ReasoningParserManager
from vllm.tool_parsers import ToolParserManager

from app.checks import architecture, vllm_source
from app.checks.vllm_source import require_parsers, tables
from configs.errors import SettingsError
from configs.settings import load_settings


def engine(**args: Any) -> Any:
    return load_settings({"engine": args}).engine


def test_the_source_says_what_the_registries_say_contract() -> None:
    tool, reasoning = tables("tool_parsers/__init__.py"), tables("reasoning/__init__.py")
    assert set(tool["_TOOL_PARSERS_TO_REGISTER"]) == set(ToolParserManager.list_registered())
    assert set(reasoning["_REASONING_PARSERS_TO_REGISTER"]) == set(ReasoningParserManager.list_registered())
    methods = tables("model_executor/layers/quantization/__init__.py")["QuantizationMethods"]
    assert list(methods) == QUANTIZATION_METHODS
    assert tables("config/cache.py")["CacheDType"] == get_args(CacheDType)
    assert tables("model_executor/model_loader/__init__.py")["LoadFormats"] == get_args(LoadFormats)
    models = tables("model_executor/models/registry.py")
    for group in (*architecture._ANSWERS, *architecture._OTHERS):
        spread = {name for name in getattr(registry, group) if name in registry._TEXT_GENERATION_MODELS}
        assert models[group].keys() | spread == getattr(registry, group).keys() | spread, group
        assert all(getattr(registry, group)[name] == entry for name, entry in models[group].items())


@pytest.mark.parametrize(
    ("args", "setting", "meant"),
    [
        ({"tool_call_parser": "hermess"}, "engine.tool_call_parser", "hermes"),
        ({"tool_call_parser": "Hermes"}, "engine.tool_call_parser", "hermes"),
        ({"reasoning_parser": "qwen_3"}, "engine.reasoning_parser", "qwen3"),
        ({"extra_args": {"quantization": "awk"}}, "engine.extra_args.quantization", "awq"),
        ({"extra_args": {"kv_cache_dtype": "fp-8"}}, "engine.extra_args.kv_cache_dtype", "fp8"),
        ({"extra_args": {"load_format": "dumy"}}, "engine.extra_args.load_format", "dummy"),
    ],
)
def test_a_misspelt_name_is_one_sentence_with_the_nearest(args: dict[str, Any], setting: str, meant: str) -> None:
    with pytest.raises(SettingsError, match=rf"^{setting}: vLLM has no .*; did you mean '{meant}'\?$"):
        require_parsers(engine(**args))


def test_a_name_that_is_like_none_is_told_some_that_there_are() -> None:
    with pytest.raises(SettingsError, match=r"it has .* and \d+ more\.$") as refused:
        require_parsers(engine(tool_call_parser="§" * 500))
    assert len(str(refused.value)) <= 400


def test_those_that_it_has_are_taken_and_none_is_needed() -> None:
    args = {"tool_call_parser": "hermes", "reasoning_parser": "qwen3", "extra_args": {"quantization": "awq"}}
    assert "hermes" in require_parsers(engine(**args))
    require_parsers(engine())
    require_parsers(engine(reasoning_parser="mine", extra_args={"reasoning_parser_plugin": "mine.py"}))


def test_without_vllm_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_source, "vllm_folder", lambda: None)
    monkeypatch.setattr(vllm_source, "tables", tables.__wrapped__)
    require_parsers(engine(tool_call_parser="hermess"))


def test_what_a_plugin_may_have_added_is_left_to_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not vllm_source.has_plugins()
    plugin = SimpleNamespace(dist=SimpleNamespace(name="own-parsers"))
    monkeypatch.setattr(vllm_source.importlib.metadata, "entry_points", lambda group: [plugin])
    require_parsers(engine(tool_call_parser="of_the_plugin"))
