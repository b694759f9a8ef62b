"""A tolerant load's time is counted from the prompt's arrival, whatever happens to the machine's clock."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.protocol.kv_port import ARRIVED, FIDELITY, PLAN, PlannedLoad
from deployments.transfer.ttft_deadline import ttft_deadline
from kvmanager.segments.keys import TOLERANT

BLOCK, TARGET_S = 32, 5.0
LOADS = [PlannedLoad(b"k" * 32, 0, 4, "redis", "", 1000)]


def give_up_at(arrived: float | None, clock: float) -> float:
    """For a prompt of 10 ms per token, of which 4 blocks are loaded; vLLM saw it when its clock said `clock`."""
    expected = {"recompute_s": 0.01 * 200, "load_s": 0.1, "device_tokens": 0, "short_tokens": 0}
    transfer: dict[str, Any] = {PLAN: {"expected": expected}, FIDELITY: TOLERANT}
    if arrived is not None:
        transfer[ARRIVED] = arrived
    request: Any = SimpleNamespace(kv_transfer_params=transfer, num_prompt_tokens=200, arrival_time=clock)
    pace = ttft_deadline(request, LOADS, 0, 4, BLOCK, TARGET_S)
    assert pace is not None
    return pace.give_up_at


@pytest.mark.parametrize("step_s", [0.0, 3600.0, -3600.0])
def test_a_step_of_the_machines_clock_moves_no_target(step_s: float) -> None:
    arrived = time.monotonic() - 1.0
    assert give_up_at(arrived, time.time() + step_s) == pytest.approx(arrived + TARGET_S - 2.0)


def test_what_a_prompt_has_waited_before_it_was_sent_counts() -> None:
    now = time.monotonic()
    assert give_up_at(now - 2.0, time.time()) == pytest.approx(give_up_at(now, time.time()) - 2.0)
