"""The mutants fit the code and the tests as they are; `make mutants` judges them."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest
from catalogue import MUTANTS
from mutant import LostPatternError, Mutant

from configs.model_folder import PROJECT_ROOT

LEAST = 40


@cache
def functions_of(path: Path) -> frozenset[str]:
    """Names of a file's test functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    functions = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in tree.body if isinstance(node, functions) and node.name.startswith("test_"))


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_its_text_stands_in_its_file_once_and_what_it_makes_is_python(mutant: Mutant) -> None:
    assert mutant.applied(PROJECT_ROOT)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_tests_that_must_turn_red_exist(mutant: Mutant) -> None:
    assert mutant.tests
    for node in mutant.tests:
        name, _, function = node.partition("::")
        found = functions_of(PROJECT_ROOT / name)
        assert (function in found) if function else found, node


def test_there_are_enough_and_each_has_a_name_of_its_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= LEAST


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("no such text", "other", "stands 0 times"),
        ("first", "other", "stands 2 times"),
        ("first = 1", "first = (", "cannot be parsed"),
        ("first = 1", "first =  1", "means the same"),
    ],
)
def test_a_mutant_that_no_longer_fits_is_refused(tmp_path: Path, old: str, new: str, why: str) -> None:
    (tmp_path / "code.py").write_text("first = 1\nsecond = first\n")
    with pytest.raises(LostPatternError, match=why):
        Mutant("any", "code.py", old, new, (), "").applied(tmp_path)
