"""Where the time to a prompt's first token went, from stamps of two processes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deployments.protocol.stage_stamps import StageStamps, stage_seconds, this_clock
from tests.quantities import up_to

HERE = "this boot"
STAMPS = StageStamps(
    HERE,
    received=2.0,
    planned=2.5,
    load_began=3.5,
    load_ended=5.5,
    scheduled=6.0,
    first_token=8.0,
    yielded=8.25,
)


def test_on_one_clock_each_stage_is_what_lies_between_its_stamps():
    assert stage_seconds(STAMPS, routed=1.0, arrived=9.0, clock=HERE) == {
        "handle": 1.0,
        "plan": 0.5,
        "queue": 1.5,  # 1.0 before the load, 0.5 after it
        "load": 2.0,
        "step": 2.0,
        "output": 0.25,
        "back": 0.75,
    }


def test_of_another_nodes_clock_only_spans_within_one_process_are_used():
    elsewhere = StageStamps("another boot", *(one + 1e6 if one else one for one in STAMPS[1:]))
    found = stage_seconds(elsewhere, routed=1.0, arrived=9.0, clock=HERE)
    assert found == {"handle": 1.75, "plan": 0.5, "queue": 1.5, "load": 2.0, "step": 2.0, "output": 0.25}


def test_a_load_that_comes_layer_by_layer_is_a_part_of_the_step():
    found = stage_seconds(STAMPS._replace(scheduled=3.5), routed=1.0, arrived=9.0, clock=HERE)
    assert (found["load"], found["queue"], found["step"]) == (0.0, 1.0, 4.5)


def test_without_the_engines_own_stamps_all_its_time_but_the_load_is_the_step():
    found = stage_seconds(STAMPS._replace(scheduled=0.0, first_token=0.0), routed=1.0, arrived=9.0, clock=HERE)
    assert (found["queue"], found["load"], found["step"], found["output"]) == (0.0, 2.0, 3.75, 0.0)


@given(
    gaps=st.lists(up_to(100.0), min_size=9, max_size=9),
    same=st.booleans(),
    loads=st.booleans(),
    engine=st.booleans(),
    layerwise=st.booleans(),
)
def test_the_stages_add_up(gaps: list[float], same: bool, loads: bool, engine: bool, layerwise: bool):
    at = [sum(gaps[: number + 1]) for number in range(9)]
    routed, received, planned, began, ended, scheduled, first, yielded, arrived = at
    if layerwise:
        began, ended, scheduled = scheduled, first, began
    load = (began, ended) if loads else None
    stats: Any = SimpleNamespace(scheduled_ts=scheduled, first_token_ts=first) if engine else None
    stamps = StageStamps.of(received, planned, yielded, load, stats)
    found = stage_seconds(stamps, routed, arrived, this_clock() if same else "another boot")
    assert sum(found.values()) == pytest.approx(arrived - routed, abs=1e-6)
    assert min(found.values()) >= 0


def test_this_machines_clock_has_a_name():
    assert this_clock() == this_clock() != ""
