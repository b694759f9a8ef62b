"""Text is UTF-8 wherever the product reads or writes it: an ASCII locale is no reason to fail.

ruff's PLW1514 finds `open` and a `Path` that it knows for one; this finds the rest by the method's name.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest
from source_imports import PACKAGES, ROOT, source_files

WITH_DATA = {"read_text": 0, "write_text": 1}
"""Methods of a `Path`, and how many arguments come before the encoding."""


def in_the_locales_encoding(source: str) -> list[str]:
    """Calls that open text, and do not say its encoding."""
    return [ast.unparse(call) for call in _calls(source) if _opens_text(call) and not _says_encoding(call)]


def _calls(source: str) -> Iterator[ast.Call]:
    return (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call))


def _says_encoding(call: ast.Call) -> bool:
    named = any(keyword.arg in ("encoding", None) for keyword in call.keywords)
    return named or len(call.args) > WITH_DATA.get(_name(call), len(call.args))


def _opens_text(call: ast.Call) -> bool:
    if _name(call) in WITH_DATA:
        return True
    modes = [word.value for word in (*call.args, *(k.value for k in call.keywords)) if isinstance(word, ast.Constant)]
    modes = [word for word in modes if isinstance(word, str) and 0 < len(word) < 4 and set(word) <= set("rwaxbt+")]
    return _name(call) in ("open", "fdopen") and any("b" not in mode for mode in modes)


def _name(call: ast.Call) -> str:
    return getattr(call.func, "attr", getattr(call.func, "id", ""))


def test_what_reads_or_writes_text_says_that_it_is_utf_8() -> None:
    files = source_files(*PACKAGES, "requirements")
    found = {str(path.relative_to(ROOT)): in_the_locales_encoding(path.read_text(encoding="utf-8")) for path in files}
    assert {path: calls for path, calls in found.items() if calls} == {}


@pytest.mark.parametrize(
    "source", ["path.read_text()", "path.write_text(data)", "open(path, 'w')", "os.fdopen(1, 'a')", "x.open(mode='r')"]
)
def test_a_call_without_an_encoding_is_found(source: str) -> None:
    assert in_the_locales_encoding(source) == [source]


@pytest.mark.parametrize(
    "source",
    [
        "path.read_text('utf-8')",
        "path.write_text(data, encoding='utf-8')",
        "open(path, 'wb')",
        "tier.open(key, 'load')",
    ],
)
def test_another_call_is_not(source: str) -> None:
    assert in_the_locales_encoding(source) == []
