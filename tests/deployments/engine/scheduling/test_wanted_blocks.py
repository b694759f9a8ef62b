"""What an engine's queue waits for, of vLLM's own queues."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import RequestStatus

from deployments.engine.scheduling.wanted_blocks import LOOKED_AT, needed_blocks, wanted_blocks

BLOCK = 32


class Waiting(SimpleNamespace):
    """As far as a queue and the count look at a request."""

    skip_reading_prefix_cache = False
    num_computed_tokens = 0
    request_id = "waits"

    def __lt__(self, other: Waiting) -> bool:
        return bool(self.arrival < other.arrival)


class Pool:
    """By block hash, which blocks are cached, and by how many requests each is held."""

    def __init__(self, held: dict[int, int]) -> None:
        self._held = held

    def get_cached_block(self, block_hash: int, groups: list[int]) -> list[Any] | None:
        count = self._held.get(block_hash)
        return None if count is None else [SimpleNamespace(ref_cnt=count)]


def scheduler(
    policy: SchedulingPolicy,
    *tokens: int,
    running: int = 0,
    status: Any = RequestStatus.WAITING,
    held: dict[int, int] | None = None,
    own: int = 0,
) -> Any:
    """All have the same block hashes, 0 to their number of full blocks; `own` blocks they hold already."""
    queue = create_request_queue(policy)
    for arrival, count in enumerate(tokens):
        request: Any = Waiting(
            num_tokens=count, status=status, arrival=arrival, block_hashes=range(count // BLOCK),
            num_computed_tokens=own * BLOCK,
        )  # fmt: skip
        queue.add_request(request)
    manager = SimpleNamespace(
        enable_caching=True, block_pool=Pool(held or {}), get_block_ids=lambda request_id: (list(range(own)),)
    )
    return SimpleNamespace(
        waiting=queue, running=[None] * running, max_num_active_reqs=4, num_waiting_for_streaming_input=0,
        block_size=BLOCK, _is_blocked_waiting_status=Scheduler._is_blocked_waiting_status, kv_cache_manager=manager,
        _holds_kv_blocks=Scheduler._holds_kv_blocks,
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


@pytest.mark.parametrize("policy", list(SchedulingPolicy))
def test_what_waiting_requests_share_with_running_ones_they_do_not_need_again(policy: SchedulingPolicy) -> None:
    """A system prompt of 200 blocks is in use; twelve requests with 6 blocks of their own wait for a turn."""
    prompts = [206 * BLOCK] * 12
    in_use, free = dict.fromkeys(range(200), 60), dict.fromkeys(range(200), 0)
    assert wanted_blocks(scheduler(policy, *prompts, held=in_use), 7) == 0, "6, and one for the answer"
    assert wanted_blocks(scheduler(policy, *prompts, held=in_use), 6) == 7 * LOOKED_AT
    assert wanted_blocks(scheduler(policy, *prompts, held=free), 206) == 207 * LOOKED_AT, (
        "cached, but free: it is taken"
    )
    assert wanted_blocks(scheduler(policy, 65, held=dict.fromkeys(range(2), 1)), 1) == 0


@pytest.mark.parametrize("held", [0, 1, 2, 5, 6])
@pytest.mark.parametrize("tokens", [191, 192, 193, 224])
def test_a_request_needs_what_it_neither_holds_nor_shares(held: int, tokens: int) -> None:
    in_use = scheduler(SchedulingPolicy.FCFS, tokens, held=dict.fromkeys(range(held), 2))
    blocks = (tokens + BLOCK) // BLOCK
    computed = (tokens - 1) // BLOCK  # of a prompt that is there wholly, the last token is computed all the same
    assert needed_blocks(in_use, in_use.waiting.peek_request()) == blocks - min(held, computed)
    holds = scheduler(SchedulingPolicy.FCFS, tokens, held=dict.fromkeys(range(6), 2), own=held or 1)
    assert needed_blocks(holds, holds.waiting.peek_request()) == blocks - (held or 1)


def test_who_may_not_read_the_cache_needs_all(monkeypatch: pytest.MonkeyPatch) -> None:
    waits = scheduler(SchedulingPolicy.FCFS, 64, held=dict.fromkeys(range(2), 1))
    waits.kv_cache_manager.enable_caching = False
    assert needed_blocks(waits, waits.waiting.peek_request()) == 3
    waits.kv_cache_manager.enable_caching = True
    assert needed_blocks(waits, waits.waiting.peek_request()) == 2
    monkeypatch.setattr(Waiting, "skip_reading_prefix_cache", True)
    assert needed_blocks(waits, waits.waiting.peek_request()) == 3
