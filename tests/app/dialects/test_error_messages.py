"""What is told of an error is cut before vLLM's regular expressions see it."""

from __future__ import annotations

import re
import types
from pathlib import Path

import vllm.entrypoints
from vllm.entrypoints.serve.exception_handling import utils

from app.dialects import error_messages
from app.dialects.error_messages import MODULES, MOST_CHARACTERS, cut_error_messages, sanitize_cut

NOT_SERVED = {"cohere.api_router", "cohere.serving", "speech_to_text.realtime.connection"}


def test_a_short_message_is_told_whole_and_without_the_servers_paths():
    assert sanitize_cut("`n` is -1, in /opt/server/code.py") == "`n` is -1, in <path>"
    assert sanitize_cut("x" * MOST_CHARACTERS) == "x" * MOST_CHARACTERS


def test_vllm_is_shown_only_the_beginning_of_a_long_one(monkeypatch):
    seen = []
    monkeypatch.setattr(error_messages, "sanitize_message", lambda text: seen.append(text) or text)
    told = sanitize_cut("/a" * 5_000_000)
    assert list(map(len, seen)) == [MOST_CHARACTERS]
    assert told.endswith(" … (9999640 more characters)")


def test_all_that_tell_errors_have_the_cutting_one():
    cut_error_messages()
    assert {module.sanitize_message for module in MODULES} == {sanitize_cut}  # type: ignore[attr-defined]


def test_vllm_contract_no_other_module_of_served_routes_sanitizes():
    root = Path(vllm.entrypoints.__path__[0])
    users = {
        ".".join(path.relative_to(root).with_suffix("").parts)
        for path in root.rglob("*.py")
        if re.search(r"import.*\bsanitize_message\b", path.read_text())
    }
    served = {module.__name__.removeprefix("vllm.entrypoints.") for module in MODULES}
    assert users == served | NOT_SERVED
    assert isinstance(utils.sanitize_message, types.FunctionType)
