"""The names that vLLM's AsyncEngineArgs takes, read from its source: importing vLLM takes seconds."""

from __future__ import annotations

import ast
import functools
import importlib.util
from pathlib import Path

_SOURCE = Path("engine") / "arg_utils.py"
_CLASSES = ("EngineArgs", "AsyncEngineArgs")


@functools.cache
def engine_argument_names() -> frozenset[str]:
    """Every field of AsyncEngineArgs; empty, to refuse nothing, where vLLM is absent or looks different."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or spec.origin is None:
        return frozenset()
    try:
        module = ast.parse((Path(spec.origin).parent / _SOURCE).read_text())
    except (OSError, SyntaxError):
        return frozenset()
    classes = [node for node in module.body if isinstance(node, ast.ClassDef) and node.name in _CLASSES]
    return frozenset(
        field.target.id
        for node in classes
        for field in node.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    )
