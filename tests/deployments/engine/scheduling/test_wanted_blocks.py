"""What an engine's queue waits for, of vLLM's own queues and of its own count of blocks."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from kv_managers import BLOCK, CHUNK, admit, compute, kv_manager, request
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.sched.request_queue import SchedulingPolicy, create_request_queue
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.request import Request, RequestStatus

from deployments.engine.scheduling.wanted_blocks import LOOKED_AT, needed_blocks, wanted_blocks

GROUPS = [(None,), (96,), (96, None), (200, 200, None), (96, None, 1000)]


def scheduler(
    policy: SchedulingPolicy,
    *waiting: int | Request,
    running: int = 0,
    status: Any = RequestStatus.WAITING,
    manager: KVCacheManager | None = None,
) -> Any:
    """With waiting prompts of so many tokens, which begin alike."""
    queue = create_request_queue(policy)
    for arrival, each in enumerate(waiting):
        asked = each if isinstance(each, Request) else request(f"waits {arrival}", each, float(arrival))
        asked.status = status
        queue.add_request(asked)
    return SimpleNamespace(
        waiting=queue, running=[None] * running, max_num_active_reqs=4, num_waiting_for_streaming_input=0,
        block_size=BLOCK, max_num_scheduled_tokens=CHUNK, kv_cache_manager=manager or kv_manager(),
        _is_blocked_waiting_status=Scheduler._is_blocked_waiting_status, _holds_kv_blocks=Scheduler._holds_kv_blocks,
    )  # fmt: skip


def needed(manager: KVCacheManager, waiting: int | Request) -> int:
    made = scheduler(SchedulingPolicy.FCFS, waiting, manager=manager)
    return needed_blocks(made, made.waiting.peek_request())


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
    manager = kv_manager()
    runs = compute(manager, request("runs", 200 * BLOCK))
    assert wanted_blocks(scheduler(policy, *prompts, manager=manager), 7) == 0, "6, and one for the answer"
    assert wanted_blocks(scheduler(policy, *prompts, manager=manager), 6) == 7 * LOOKED_AT
    manager.free(runs)
    assert wanted_blocks(scheduler(policy, *prompts, manager=manager), 206) == 207 * LOOKED_AT, (
        "cached, but free: it is taken"
    )


@pytest.mark.parametrize("held", [1, 2, 5, 6])
@pytest.mark.parametrize("tokens", [191, 192, 193, 224])
def test_a_request_needs_what_it_neither_holds_nor_shares(held: int, tokens: int) -> None:
    manager = kv_manager()
    compute(manager, request("runs", held * BLOCK))
    blocks = (tokens + BLOCK) // BLOCK
    computed = (tokens - 1) // BLOCK  # of a prompt that is there wholly, the last token is computed all the same
    assert needed(manager, tokens) == blocks - min(held, computed)
    manager = kv_manager()
    holds = compute(manager, request("holds", held * BLOCK))
    holds.append_output_token_ids([1] * max(0, tokens - held * BLOCK))
    assert needed(manager, holds) == -(-(holds.num_tokens + 1) // BLOCK) - held


def test_who_may_not_read_the_cache_needs_all() -> None:
    assert needed(kv_manager(caches=False), 64) == 3
    manager = kv_manager()
    compute(manager, request("runs", 64))
    assert needed(manager, 64) == 2
    shy = request("shy", 64)
    shy.skip_reading_prefix_cache = True
    assert needed(manager, shy) == 3


@given(
    windows=st.sampled_from(GROUPS),
    others=st.lists(st.tuples(st.integers(1, 1500), st.booleans()), max_size=3),
    tokens=st.integers(1, 3000),
)
def test_a_request_is_admitted_with_what_it_needs_and_not_with_a_block_less_of_each_group(
    windows: tuple[int | None, ...], others: list[tuple[int, bool]], tokens: int
) -> None:
    """By vLLM's own manager; with a block for its first token of which vLLM does not think yet."""
    for less in (0, len(windows) + 1):
        manager = kv_manager(windows)
        for number, (length, stays) in enumerate(others):
            runs = compute(manager, request(f"runs {number}", length))
            if not stays:
                manager.free(runs)
        waits = request("waits", tokens)
        free = needed(manager, waits) - less
        pool = manager.block_pool
        empty = [block for block in pool.free_block_queue.get_all_free_blocks() if block.block_hash is None]
        surplus = pool.get_num_free_blocks() - free
        assume(free >= 0 and 0 <= surplus <= len(empty))
        pool.touch(empty[:surplus])
        assert admit(manager, waits) is (less == 0)


def test_a_prefix_that_is_in_use_in_one_group_only_is_needed_again_in_all() -> None:
    """Of 40 blocks that begin another prompt, full attention has all; the window has gone on with that prompt."""
    manager = kv_manager((96, None))
    compute(manager, request("runs", 80 * BLOCK))
    window = -(-(96 - 1 + CHUNK) // BLOCK) + 1
    assert needed(manager, 40 * BLOCK) == 41 + window
    assert needed(kv_manager((None,)), 40 * BLOCK) == 41
