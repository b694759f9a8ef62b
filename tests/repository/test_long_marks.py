"""A test that `make test` leaves out names another one, which holds its claim there."""

from __future__ import annotations

import ast
from collections.abc import Iterator

import pytest

from configs.model_folder import PROJECT_ROOT

LONG = "pytest.mark.long"


def trees() -> Iterator[ast.Module]:
    for path in (PROJECT_ROOT / "tests").rglob("test_*.py"):
        text = path.read_text()
        if LONG in text:
            yield ast.parse(text)


def is_long(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func) == LONG


NAMED = [node.args[0].value for tree in trees() for node in ast.walk(tree) if is_long(node)]  # type: ignore[attr-defined]


@pytest.mark.parametrize("name", sorted(set(NAMED)))
def test_what_a_long_test_names_is_run_by_make_test(name: str) -> None:
    path, _, test = name.partition("::")
    body = ast.parse((PROJECT_ROOT / path).read_text()).body
    of_file = [each for each in body if isinstance(each, ast.Assign) and ast.unparse(each.targets[0]) == "pytestmark"]
    marks = [node for each in of_file for node in ast.walk(each)]
    assert not any(map(is_long, marks)), "all of that file is long"
    if test:
        (found,) = (each for each in body if isinstance(each, ast.FunctionDef) and each.name == test)
        assert not any(map(is_long, found.decorator_list))


def test_every_long_test_names_one() -> None:
    marks = [node for tree in trees() for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    assert sum(ast.unparse(node) == LONG for node in marks) == len(NAMED)
