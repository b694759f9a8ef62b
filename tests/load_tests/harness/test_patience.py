"""Waits end when their condition holds, and last longer on a slow machine."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest

from load_tests.harness import patience
from load_tests.harness.patience import MOST, REFERENCE_S, measured, slowness, until, until_it_holds


class Clock:
    """Time passes only where a wait sleeps."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@pytest.mark.parametrize(("took_s", "slower"), [(REFERENCE_S / 3, 1.0), (3 * REFERENCE_S, 3.0), (1e3, MOST)])
def test_a_machine_is_as_slow_as_its_errand_takes_longer_than_at_rest(took_s: float, slower: float) -> None:
    clock = Clock()
    assert measured(lambda: clock.sleep(took_s), clock.monotonic) == pytest.approx(slower)


def test_this_machine_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []
    monkeypatch.setattr(patience, "measured", lambda: counted.append(1) or 4.0)
    slowness.cache_clear()
    try:
        assert [patience.patience(seconds) for seconds in (1.0, 20.0)] == [4.0, 80.0]
        assert len(counted) == 1
    finally:
        slowness.cache_clear()


def test_an_errand_of_this_machine_computes_and_starts_processes() -> None:
    assert 1.0 <= measured() <= MOST


@pytest.mark.parametrize("slower", [1.0, 4.0])
def test_a_wait_lasts_longer_on_a_slow_machine_and_says_what_it_waited_for(
    slower: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patience, "slowness", lambda: slower)
    clock = Clock()
    until(lambda: clock.now > 100 + 29 * slower, "it comes", 30.0, 1.0, 1.0, clock)
    assert clock.now == pytest.approx(101 + 29 * slower, abs=1.0)
    began = clock.now
    with pytest.raises(TimeoutError, match=rf"not within {30 * slower:.0f} s: it comes"):
        until(lambda: False, "it comes", 30.0, 1.0, 1.0, clock)
    assert clock.now - began == pytest.approx(30 * slower, abs=1.5)


def test_a_wait_that_ends_in_time_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "slowness", lambda: pytest.fail("measured"))
    clock = Clock()
    until(lambda: clock.now > 120, "it comes", 30.0, clock=clock)


def test_what_is_waited_for_is_asked_for_ever_more_seldom() -> None:
    clock, asked = Clock(), []
    until(lambda: asked.append(clock.now) or clock.now > 125, "it comes", 30.0, 0.1, 1.0, clock)
    pauses = [later - earlier for earlier, later in pairwise(asked)]
    assert pauses == sorted(pauses)
    assert pauses[0] == pytest.approx(0.1)
    assert pauses[-1] == pytest.approx(1.0)


def test_an_event_loop_goes_on_while_it_is_waited_on_it() -> None:
    async def main() -> None:
        done = asyncio.Event()
        asyncio.get_running_loop().call_later(0.01, done.set)
        await until_it_holds(done.is_set, "the loop has run what was due")
        with pytest.raises(TimeoutError, match="never"):
            await until_it_holds(lambda: False, "never", 0.0)

    asyncio.run(main())
