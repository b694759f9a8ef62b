"""Blocks of windows are held from the step that fills them until they are saved, and never more than a share."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from counted_pool import Pool
from vllm.v1.request import RequestStatus

from deployments.engine.groups import KVGroups
from deployments.engine.held_windows import HeldWindows, WindowSaves
from deployments.engine.tracked_request import NEVER_SAVED, PlannedChain, SaveProgress, TrackedRequest

BLOCK = 32
GROUPS = KVGroups((64, None), {})


@pytest.fixture
def pool() -> Pool:
    return Pool()


@pytest.fixture
def windows(pool: Pool) -> HeldWindows:
    """A sequence's window lies in blocks 101, 102, …, of which the first is gone; all its dense KV in 201, 202, …"""
    tables = ([0, *range(102, 110)], list(range(201, 210)))
    manager: Any = SimpleNamespace(block_pool=pool, get_block_ids=lambda request_id: tables)
    return HeldWindows(manager, GROUPS, BLOCK, most_blocks=4)


def request(saved_blocks: int = 0) -> TrackedRequest:
    asked: Any = SimpleNamespace(
        request_id="one", num_tokens=200, num_prompt_tokens=200, mm_features=[], status=RequestStatus.RUNNING
    )
    return TrackedRequest(asked, PlannedChain((), 0, 1.0), SaveProgress(saved_blocks))


def test_what_a_step_fills_is_held_once_until_it_is_saved(windows: HeldWindows, pool: Pool) -> None:
    tracked = request()
    windows.planned(tracked, 2 * BLOCK + 5, admitted=True)
    windows.planned(tracked, 4 * BLOCK - 1, admitted=False)
    assert pool.now == {102, 103, 201, 202, 203}
    assert windows.tables(tracked, 0, 4) == [[0, 102, 103, 0], [201, 202, 203, 0]]
    tracked.saving.reach(2)
    windows.saved(tracked)
    assert pool.now == {103, 203}
    windows.left(tracked)
    assert (pool.now, windows.blocks) == (set(), 0)


def test_nothing_is_held_of_what_is_stored_already(windows: HeldWindows, pool: Pool) -> None:
    windows.planned(request(saved_blocks=3), 5 * BLOCK, admitted=True)
    assert pool.now == {104, 105, 204, 205}


@pytest.mark.parametrize(
    ("window", "most_blocks", "is_saved"),
    [
        pytest.param(256, 72, True, id="a pool for 1,536 tokens: half of the step is the request's own"),
        pytest.param(64, 60, False, id="most of the step would be kept from others"),
        pytest.param(512, 0, True, id="all of it lies within the window"),
    ],
)
def test_a_large_step_is_held_and_saved_where_others_have_room(
    window: int, most_blocks: int, is_saved: bool, pool: Pool
) -> None:
    tables = [[100 * group + block for block in range(1, 17)] for group in range(6)]
    manager: Any = SimpleNamespace(block_pool=pool, get_block_ids=lambda request_id: tables)
    held, tracked = HeldWindows(manager, KVGroups((*[window] * 5, None), {}), BLOCK, most_blocks), request()
    held.planned(tracked, 16 * BLOCK, admitted=True)
    assert (held.blocks, tracked.saving.is_never) == (16 * 6 * is_saved, not is_saved)


def test_what_a_preempted_request_holds_is_kept_from_others(windows: HeldWindows, pool: Pool) -> None:
    first, second = request(), request()
    second.request.request_id = "two"
    windows.planned(first, 3 * BLOCK, admitted=True)
    first.request.status = RequestStatus.PREEMPTED
    windows.planned(second, 2 * BLOCK, admitted=True)
    assert (first.saving.is_never, second.saving.is_never) == (False, True)


def test_a_request_that_would_hold_too_much_holds_nothing_and_is_not_saved(windows: HeldWindows, pool: Pool) -> None:
    tracked = request()
    windows.planned(tracked, 3 * BLOCK, admitted=True)
    windows.planned(tracked, 8 * BLOCK, admitted=False)
    assert (pool.now, windows.blocks, tracked.saving.blocks) == (set(), 0, NEVER_SAVED)
    assert windows.given_up.counts == {"share": 1, "preempted": 0, "room": 0}
    windows.planned(tracked, 9 * BLOCK, admitted=False)
    assert not pool.now


def test_a_request_that_was_preempted_while_it_held_blocks_holds_none_any_more(
    windows: HeldWindows, pool: Pool
) -> None:
    """Else it might be preempted for ever, for the blocks that it holds itself."""
    tracked = request()
    windows.planned(tracked, 3 * BLOCK, admitted=True)
    windows.planned(tracked, 3 * BLOCK, admitted=True)
    assert (pool.now, tracked.saving.is_never) == (set(), True)
    assert windows.given_up.counts == {"share": 0, "preempted": 1, "room": 0}


def test_room_is_made_by_letting_go_of_everything(windows: HeldWindows, pool: Pool) -> None:
    tracked = request()
    windows.planned(tracked, 3 * BLOCK, admitted=True)
    windows.make_room()
    assert (pool.now, windows.blocks, tracked.saving.is_never) == (set(), 0, True)
    windows.make_room()
    assert windows.given_up.counts == {"share": 0, "preempted": 0, "room": 1}


def test_a_request_that_wants_blocks_gets_those_of_windows_and_those_of_saves_that_wait(
    windows: HeldWindows, pool: Pool
) -> None:
    dropped: list[set[int]] = []
    held_saves: Any = SimpleNamespace(transfer=SimpleNamespace(drop_waiting_saves=lambda: dropped.append(pool.now)))
    manager: Any = SimpleNamespace(block_pool=pool)
    layerwise: Any = None
    saves = WindowSaves(manager, held_saves, layerwise, BLOCK, 4, windows)
    saves.planned(request(), BLOCK, BLOCK, admitted=True)
    assert saves.held_blocks == 3
    saves.make_room()
    assert (saves.held_blocks, dropped) == (0, [set()])
    (family,) = saves.families()
    assert {sample.labels["reason"] for sample in family.samples if sample.value} == {"room"}
