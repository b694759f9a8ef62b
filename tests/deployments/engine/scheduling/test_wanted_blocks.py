"""What an engine's queue waits for, of vLLM's own queues."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from deployments.engine.scheduling.wanted_blocks import LOOKED_AT, wanted_blocks


class Waiting(SimpleNamespace):
    """As far as a queue and the count look at a request."""

    def __lt__(self, other: Waiting) -> bool:
        return bool(self.arrival < other.arrival)


def scheduler(policy: SchedulingPolicy, *tokens: int, running: int = 0, status: Any = RequestStatus.WAITING) -> Any:
    queue = create_request_queue(policy)
    for arrival, count in enumerate(tokens):
        queue.add_request(Waiting(num_tokens=count, status=status, arrival=arrival))  # type: ignore[arg-type]
    return SimpleNamespace(
        waiting=queue, running=[None] * running, max_num_active_reqs=4, num_waiting_for_streaming_input=0,
        block_size=32, _is_blocked_waiting_status=Scheduler._is_blocked_waiting_status,
    )  # fmt: skip


@pytest.mark.parametrize("policy", list(SchedulingPolicy))
def test_who_waits_for_room_is_counted_and_who_only_waits_for_the_next_step_is_not(policy: SchedulingPolicy) -> None:
    assert wanted_blocks(scheduler(policy), 0) == 0
    assert wanted_blocks(scheduler(policy, 65), 3) == 0, "it fits"
    assert wanted_blocks(scheduler(policy, 65), 2) == 3
    assert wanted_blocks(scheduler(policy, 65, 10, 33), 2) == 3 + 1 + 2
    assert wanted_blocks(scheduler(policy, 10, 1000), 2) == 0, "the first one fits"
    assert wanted_blocks(scheduler(policy, 65, status=RequestStatus.PREEMPTED), 2) == 3
    assert wanted_blocks(scheduler(policy, *[33] * 100), 1) == 2 * LOOKED_AT


@pytest.mark.parametrize("policy", list(SchedulingPolicy))
def test_who_waits_for_a_run_slot_or_a_load_waits_for_no_room(policy: SchedulingPolicy) -> None:
    assert wanted_blocks(scheduler(policy, 65, running=4), 0) == 0
    assert wanted_blocks(scheduler(policy, 65, status=RequestStatus.WAITING_FOR_REMOTE_KVS), 0) == 0
