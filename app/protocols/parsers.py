"""Whether vLLM has the parsers that the settings name, asked before anything starts.

Leans on vLLM: its two registries, which list parsers without importing them.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from configs.errors import SettingsError
from configs.sections import EngineSettings


def require_parsers(engine: EngineSettings) -> None:
    """Raise SettingsError, which names what there is, for a parser that vLLM does not have. Imports vLLM if one is
    named."""
    if engine.tool_call_parser is not None:
        from vllm.tool_parsers import ToolParserManager

        _require("engine.tool_call_parser", engine.tool_call_parser, ToolParserManager.list_registered())
    if engine.reasoning_parser is not None:
        from vllm.reasoning import ReasoningParserManager

        _require("engine.reasoning_parser", engine.reasoning_parser, ReasoningParserManager.list_registered())


def _require(setting: str, name: str, known: Sequence[str]) -> None:
    if name not in known:
        close = difflib.get_close_matches(name, known, n=1)
        meant = f"; did you mean {close[0]!r}?" if close else ";"
        raise SettingsError(f"{setting}: vLLM has no {name!r}{meant} It has {', '.join(known)}.")
