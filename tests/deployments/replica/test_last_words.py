"""A replica's process ends once its requests have heard that the engine is dead, however slowly it runs."""

from __future__ import annotations

import os
import queue
from collections.abc import Callable
from typing import Any

import pytest

from deployments.replica import replica
from deployments.replica.replica import TURNS, end_process_once_told
from load_tests.harness.patience import patience


class SteppedLoop:
    """An event loop whose turns the test makes."""

    def __init__(self) -> None:
        self._asked: queue.Queue[Callable[[], None]] = queue.Queue()

    def call_soon_threadsafe(self, callback: Callable[[], None]) -> None:
        self._asked.put(callback)

    def turn(self) -> None:
        self._asked.get(timeout=patience(20))()


@pytest.fixture
def ended(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """With which status the process would have ended."""
    statuses: list[int] = []
    monkeypatch.setattr(os, "_exit", statuses.append)
    monkeypatch.setattr(replica, "LAST_WORDS_S", 0.0)
    monkeypatch.setattr(replica, "MOST_LAST_WORDS_S", patience(60))
    return statuses


def test_the_process_outlives_its_requests(ended: list[int]) -> None:
    asked: list[int] = []

    def ongoing() -> int:
        asked.append(len(asked))
        return 1 if len(asked) <= 3 * TURNS else 0

    end_process_once_told(ongoing, None).join(patience(20))
    assert (len(asked), ended) == (4 * TURNS, [1])


def test_a_loop_that_hardly_runs_is_given_its_turns(ended: list[int]) -> None:
    loop: Any = SteppedLoop()
    waiting = end_process_once_told(lambda: 0, loop)
    for _ in range(TURNS - 1):
        loop.turn()
    assert ended == []
    loop.turn()
    waiting.join(patience(20))
    assert ended == [1]


def test_a_request_that_never_ends_does_not_keep_the_process(ended: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replica, "MOST_LAST_WORDS_S", 0.05)
    loop: Any = SteppedLoop()  # it makes no turn at all
    end_process_once_told(lambda: 1, loop).join(patience(20))
    assert ended == [1]
