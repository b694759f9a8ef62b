"""An exact load goes on while it pays. A tolerant one's time counts from the prompt's arrival, whatever clocks do."""

from __future__ import annotations

import math
import time
from types import SimpleNamespace
from typing import Any

import pytest
from own_clock import OwnClock

from deployments.engine.load_paths import whole
from deployments.engine.load_paths.whole import load_cutoff
from deployments.protocol.engine_hints import EngineHints
from kvmanager.loading.prefix_load import PrefixLoad
from kvmanager.moves.plan import Plan, PlanExpectation, PlannedLoad
from kvmanager.segments.keys import TOLERANT

BLOCK, TARGET_S = 32, 5.0
LOADS = [PlannedLoad(b"k" * 32, 0, 4, "redis", "", 1000)]


EXPECTED = PlanExpectation(load_s=3.0, recompute_s=0.01 * 200, deadline_s=2.0)
TWO = [PlannedLoad(b"k" * 32, 0, 2, "redis", "", 500), PlannedLoad(b"l" * 32, 2, 2, "redis", "", 500)]


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> OwnClock:
    """The cutoff's time: a pause between two of its questions takes none of it."""
    clock = OwnClock()
    monkeypatch.setattr(whole, "time", clock)
    return clock


def give_up_at(arrived: float | None, clock: float) -> float:
    """For a prompt of 10 ms per token, of which 4 blocks are loaded; vLLM saw it when its clock said `clock`."""
    transfer = EngineHints(Plan(expected=EXPECTED), fidelity=TOLERANT, arrived=arrived).as_transfer()
    request: Any = SimpleNamespace(kv_transfer_params=transfer, num_prompt_tokens=200, arrival_time=clock)
    cutoff = load_cutoff(request, LOADS, 0, 4, BLOCK, TARGET_S, least_s=2.0)
    assert cutoff is not None
    return cutoff.give_up_at


@pytest.mark.parametrize("step_s", [0.0, 3600.0, -3600.0])
def test_a_step_of_the_machines_clock_moves_no_target(step_s: float, clock: OwnClock) -> None:
    arrived = clock.monotonic() - 1.0
    assert give_up_at(arrived, time.time() + step_s) == pytest.approx(arrived + TARGET_S - 2.0)


def test_what_a_prompt_has_waited_before_it_was_sent_counts(clock: OwnClock) -> None:
    now = clock.monotonic()
    assert give_up_at(now - 2.0, time.time()) == pytest.approx(give_up_at(now, time.time()) - 2.0)


def exact_cutoff(plan: Plan | None) -> PrefixLoad | None:
    """Of two segments of two blocks, 0.64 s to compute each."""
    request: Any = SimpleNamespace(kv_transfer_params=EngineHints(plan).as_transfer(), num_prompt_tokens=200)
    return load_cutoff(request, TWO, 0, 4, BLOCK, TARGET_S, least_s=2.0)


@pytest.mark.parametrize(
    ("first_after_s", "goes_on"),
    [(2.9, True), (3.1, False)],
    ids=["within the time that was expected", "later, and slower than computing"],
)
def test_an_exact_load_that_is_slower_than_computing_ends_after_the_time_that_was_expected(
    first_after_s: float, goes_on: bool
) -> None:
    cutoff = exact_cutoff(Plan(expected=EXPECTED))
    assert cutoff is not None
    assert cutoff.give_up_at == math.inf, "it has no target"
    cutoff.begins(100.0)
    assert cutoff.arrived(100.0 + first_after_s) is goes_on


def test_a_late_load_goes_on_while_it_is_faster_than_computing() -> None:
    cutoff = exact_cutoff(Plan(expected=EXPECTED._replace(recompute_s=200.0)))
    assert cutoff is not None
    cutoff.begins(100.0)
    assert cutoff.arrived(110.0), "10 s a segment, and 64 s to compute it"


def test_while_nothing_is_known_of_computing_a_load_goes_on() -> None:
    assert exact_cutoff(Plan(expected=EXPECTED._replace(recompute_s=0.0))) is None
    assert exact_cutoff(None) is None
