"""xgrammar's compiler with a bound for JSON's whitespace: `engine.json_whitespace` characters in a row.

Without one a model may write line feeds until its tokens are spent, and the answer is no JSON (vllm#38696). Guidance
knows none or any number, and so has none under a bound; Outlines and lm-format-enforcer have bounds of their own: one
space, and twelve.
"""

from __future__ import annotations

import json
from typing import Any

from xgrammar import CompiledGrammar, GrammarCompiler

_SCHEMAS = frozenset({"json_schema", "qwen_xml_parameter"})
"""Formats of a structural tag that are JSON, or hold it."""


class BoundedCompiler(GrammarCompiler):
    """Bounds whitespace where nothing else was asked for."""

    most: int | None = None

    def compile_json_schema(self, schema: Any, *, any_whitespace: bool = True, **options: Any) -> CompiledGrammar:
        """As `GrammarCompiler` does."""
        if any_whitespace:
            options = {"max_whitespace_cnt": self.most, **options}
        return super().compile_json_schema(schema, any_whitespace=any_whitespace, **options)

    def compile_structural_tag(self, *args: Any, **options: Any) -> CompiledGrammar:
        """As `GrammarCompiler` does; the old form with triggers has no place for a bound."""
        if self.most is not None and len(args) == 1 and isinstance(args[0], str):
            args = (json.dumps(_bounded(json.loads(args[0]), self.most)),)
        return super().compile_structural_tag(*args, **options)


def _bounded(part: Any, most: int) -> Any:
    """The same structural tag, whose schemas have a bound. Schemas themselves are not looked into."""
    if isinstance(part, list):
        return [_bounded(each, most) for each in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") in _SCHEMAS and "json_schema" in part:
        return {**part, "max_whitespace_cnt": part.get("max_whitespace_cnt") or most}
    return {name: _bounded(each, most) for name, each in part.items()}
