"""When a process sets aside what it has built, and what the garbage collector does while libraries are imported."""

from __future__ import annotations

import gc
import importlib

import pytest

from deployments.protocol.memory import GROWTH, GcFreeze, modules_set_aside


@pytest.fixture
def freezes(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether the collector was on, at each freeze; nothing of this process is frozen."""
    seen: list[bool] = []
    monkeypatch.setattr(gc, "freeze", lambda: seen.append(gc.isenabled()))
    return seen


def test_an_index_is_set_aside_when_it_has_grown(freezes: list[bool]) -> None:
    garbage = GcFreeze()
    sizes = [0, GROWTH - 1, GROWTH, 2 * GROWTH - 1, 2 * GROWTH]
    assert [garbage.set_aside(size) for size in sizes] == [False, False, True, False, True]
    assert len(freezes) == 2


def test_what_takes_the_place_of_an_index_is_set_aside_too(freezes: list[bool]) -> None:
    garbage = GcFreeze()
    sizes = [5 * GROWTH, GROWTH // 2, GROWTH, 2 * GROWTH]
    assert [garbage.set_aside(size) for size in sizes] == [True, False, False, True]


def test_nothing_is_looked_for_while_modules_are_imported_and_they_are_set_aside(freezes: list[bool]) -> None:
    with modules_set_aside():
        assert not gc.isenabled()
    assert gc.isenabled()
    assert freezes == [False]


def test_a_library_that_is_missing_leaves_the_collector_on(freezes: list[bool]) -> None:
    with pytest.raises(ModuleNotFoundError), modules_set_aside():
        importlib.import_module("no_such_module")
    assert gc.isenabled()
