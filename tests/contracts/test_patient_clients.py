"""HTTP clients of tests and of the harness say how long they wait: httpx's own 5 s are less than a pause may take."""

from __future__ import annotations

import ast
from pathlib import Path

from configs.settings import PROJECT_ROOT

CALLS = {"get", "post", "put", "patch", "delete", "head", "options", "request", "stream", "Client", "AsyncClient"}


def impatient(source: str) -> list[int]:
    """The lines of httpx's calls that go over a network and name no `timeout`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in CALLS:
            named = {keyword.arg for keyword in node.keywords}
            if ast.unparse(node.func.value) == "httpx" and not named & {"timeout", "transport", None}:
                found.append(node.lineno)
    return found


def test_a_client_that_names_no_time_is_found() -> None:
    assert impatient("httpx.get(url)\nhttpx.Client(timeout=60)\nhttpx.Client(transport=mock)\nclient.get(url)\n") == [1]


def test_each_client_says_how_long_it_waits() -> None:
    files = [path for folder in ("tests", "load_tests") for path in Path(PROJECT_ROOT, folder).rglob("*.py")]
    found = {str(path): lines for path in files if (lines := impatient(path.read_text(encoding="utf-8")))}
    assert found == {}
