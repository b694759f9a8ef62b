"""Whether vLLM knows the parsers, the method of quantization and the formats that the settings name."""

from __future__ import annotations

import difflib
from collections.abc import Collection

from app.checks.vllm_source import has_plugins, tables
from configs.errors import SettingsError
from configs.sections import EngineSettings

_MOST_NAMED = 8
"""Of what there is, where no name is near: all would be too long for a sentence."""


def require_parsers(engine: EngineSettings) -> str:
    """Say what was named. Raises SettingsError for a name that vLLM does not know, with the nearest that it does."""
    named = {
        "engine.tool_call_parser": (
            engine.tool_call_parser,
            tables("tool_parsers/__init__.py").get("_TOOL_PARSERS_TO_REGISTER"),
        ),
        "engine.reasoning_parser": (
            engine.reasoning_parser,
            tables("reasoning/__init__.py").get("_REASONING_PARSERS_TO_REGISTER"),
        ),
        "engine.extra_args.quantization": (
            engine.extra_args.get("quantization"),
            tables("model_executor/layers/quantization/__init__.py").get("QuantizationMethods"),
        ),
        "engine.extra_args.kv_cache_dtype": (
            engine.extra_args.get("kv_cache_dtype"),
            tables("config/cache.py").get("CacheDType"),
        ),
        "engine.extra_args.load_format": (
            engine.extra_args.get("load_format"),
            tables("model_executor/model_loader/__init__.py").get("LoadFormats"),
        ),
    }
    plugged = engine.extra_args.get("reasoning_parser_plugin")
    for setting, (name, known) in named.items():
        if name is not None and known and not (plugged and setting == "engine.reasoning_parser") and not has_plugins():
            _require(setting, name, known)
    return ", ".join(f"{setting}: {name}" for setting, (name, _) in named.items() if name is not None) or "none is set"


def _require(setting: str, name: object, known: Collection[str]) -> None:
    if name in known:
        return
    close = difflib.get_close_matches(str(name).lower(), known, n=1)
    if close:
        raise SettingsError(f"{setting}: vLLM has no {str(name)[:60]!r}; did you mean {close[0]!r}?")
    some = sorted(known)[:_MOST_NAMED]
    raise SettingsError(
        f"{setting}: vLLM has no {str(name)[:60]!r}; it has {', '.join(some)} and {len(known) - len(some)} more."
    )
