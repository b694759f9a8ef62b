"""The log of deltas is bounded in events, and in the segments and blocks that they are about."""

from __future__ import annotations

import random

import pytest

from kvmanager.index import deltas
from kvmanager.index.deltas import DeltaLog, Event, weight


def blocks(count: int) -> Event:
    return "dev+", "replica", [bytes([number % 256]) * 32 for number in range(count)]


def kept(log: DeltaLog) -> int:
    """Return how many of the newest events can still be told."""
    return next(back for back in range(log.last + 1) if log.since(log.last - back - 1, 1 << 30) is None)


def test_events_of_many_blocks_are_kept_by_their_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deltas, "MOST_WEIGHT", 1000)
    log = DeltaLog(64)
    for _ in range(50):
        log.append(blocks(100))
    assert (log.last, kept(log)) == (50, 10)
    log.append(blocks(5000))
    assert kept(log) == 1, "the newest is kept whatever it weighs"


@pytest.mark.parametrize("seed", range(5))
def test_what_is_told_is_what_was_appended_and_what_is_not_kept_is_none(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deltas, "MOST_WEIGHT", 60)
    rng = random.Random(seed)
    log, told = DeltaLog(8), list[Event]()
    for _ in range(300):
        event: Event = blocks(rng.randrange(1, 25)) if rng.random() < 0.5 else ("dev0", "replica")
        log.append(event)
        told.append(event)
        first = len(told) - kept(log)
        here = told[first:]
        assert len(here) <= 8
        assert len(here) == 1 or sum(map(weight, here)) <= 60
        assert first == 0 or len(here) == 8 or sum(map(weight, told[first - 1 :])) > 60, (
            "no more is dropped than must be"
        )
        start = rng.randrange(first, len(told) + 1)
        assert log.since(start, 1 << 30) == told[start:]
        assert first == 0 or log.since(first - 1, 1 << 30) is None
    assert log.since(log.last + 1, 1) is None
