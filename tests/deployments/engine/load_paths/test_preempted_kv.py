"""What a preempted request finds again: one save, one plan for each preemption, and no lease that nobody gives back."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.engine.load_paths.base import LoadPath
from deployments.engine.load_paths.preempted import HELD_WITHIN_S, PLAN_WITHIN_S, STORED_WITHIN_S, PreemptedKV
from deployments.engine.tracked_request import PlannedChain, SaveProgress, TrackedRequest
from kvmanager.moves.plan import Plan, PlannedLoad, PlanQuery

BLOCK = 32
OLD_LEASE, NEW_LEASE = 3, 9


class World:
    """A port that answers when it is told to, saves that end when they are told to."""

    def __init__(self) -> None:
        self.now = 100.0
        self.released: list[int] = []
        self.asked: list[tuple[list[bytes], Callable[[Plan | None], None]]] = []
        self.saved: list[int] = []
        self.has_room = True
        self.on_stored: Callable[[int | None], None] = lambda stored: None
        self.on_freed: Callable[[], None] = lambda: None
        self.on_device: set[bytes] = set()
        self.onboarded: list[tuple[Any, int]] = []
        self.onboarding: Future[int] = Future()
        self.scored = 0
        port: Any = SimpleNamespace(release=self.released.append, plan_again=self._ask)
        saves: Any = SimpleNamespace(save=self._save)
        control: Any = SimpleNamespace(
            has=lambda name: name in self.on_device, hear=lambda epoch, now: True, onboard=self._onboard
        )
        self.kept = PreemptedKV(port, saves, BLOCK, lambda run: run(), self._score, control, lambda: self.now)
        self.request: Any = SimpleNamespace(
            request_id="one", num_computed_tokens=330, num_tokens=340, block_hashes=[bytes([n]) * 32 for n in range(10)]
        )
        self.tracked = TrackedRequest(self.request, PlannedChain((), OLD_LEASE, 1.0), SaveProgress(4))

    def _ask(self, query: PlanQuery, on_plan: Callable[[Plan | None], None]) -> None:
        self.asked.append((list(query.hashes), on_plan))
        self.needs_landing = query.needs_landing

    def _save(self, tracked: TrackedRequest, end: int, on_stored: Any, on_freed: Any) -> int:
        self.saved.append(end)
        self.on_stored, self.on_freed = on_stored, on_freed
        if self.has_room:
            tracked.saving.reach(max(tracked.saving.blocks, end))
        return 0

    def _score(self, tracked: TrackedRequest) -> None:
        self.scored += 1

    def _onboard(self, onboarding: Any, first: int) -> Future[int]:
        self.onboarded.append((onboarding, first))
        return self.onboarding

    def answer(self, plan: Plan | None, number: int = -1) -> None:
        self.asked[number][1](plan)

    def preempt_and_store(self) -> None:
        self.kept.before(self.tracked)
        self.on_freed()
        self.on_stored(2)


@pytest.fixture
def world() -> World:
    return World()


def plan() -> Plan:
    load = PlannedLoad(b"k" * 32, 0, 10, "cpu", "node", 100)
    return Plan(lease_id=NEW_LEASE, segments=(load,), now=1.0, epoch=1)


def test_all_full_blocks_are_saved_and_what_the_first_plan_held_is_given_back(world: World) -> None:
    world.kept.before(world.tracked)
    assert world.saved == [10]
    assert world.scored == 1
    assert world.released == [OLD_LEASE]
    assert world.tracked.plan.loads == ()


def test_blocks_of_a_preemption_are_about_to_be_free_until_they_are_copied_or_time_is_over(world: World) -> None:
    assert not world.kept.holds_blocks
    world.kept.before(world.tracked)
    assert world.kept.holds_blocks
    world.on_freed()
    assert not world.kept.holds_blocks
    world.tracked.saving.reach(4)
    world.kept.before(world.tracked)
    world.now += HELD_WITHIN_S
    assert not world.kept.holds_blocks, "a save that hangs keeps nobody from being preempted"


def test_nothing_is_held_and_nobody_waits_where_there_was_nothing_to_save(world: World) -> None:
    world.has_room = False
    world.kept.before(world.tracked)
    assert not world.kept.holds_blocks
    assert world.kept.awaits(world.tracked, 0), "for the plan"
    assert len(world.asked) == 1


def test_who_is_loading_or_was_given_bad_blocks_is_not_saved(world: World) -> None:
    world.tracked.begin_load(320, ())
    world.kept.before(world.tracked)
    world.tracked.end_load()
    world.tracked.state[LoadPath()] = "blocks that it hides"
    world.kept.before(world.tracked)
    assert world.saved == []
    assert not world.kept.awaits(world.tracked, 0)


def test_it_is_planned_anew_once_over_prompt_and_answer_when_what_it_saved_can_be_planned(world: World) -> None:
    world.kept.before(world.tracked)
    world.on_freed()
    assert world.kept.awaits(world.tracked, 0)
    assert world.asked == [], "the plan would not know what is being saved"
    world.on_stored(2)
    for _ in range(5):  # vLLM asks in every step
        assert world.kept.awaits(world.tracked, 64)
    assert [hashes for hashes, _ in world.asked] == [world.request.block_hashes]
    world.answer(plan())
    assert not world.kept.awaits(world.tracked, 64)
    assert (world.tracked.plan.lease_id, [load.end_block for load in world.tracked.plan.loads]) == (NEW_LEASE, [10])
    world.tracked.plan.drop()  # the load failed
    assert not world.kept.awaits(world.tracked, 64), "not a second time"
    assert len(world.asked) == 1
    world.kept.end(world.tracked)
    assert world.released == [OLD_LEASE], "the load, or the end, gives the new one back"


@pytest.mark.parametrize("windows", [False, True])
def test_of_a_model_with_windows_it_says_that_the_device_may_count_for_nothing(world: World, windows: bool) -> None:
    world.kept.needs_landing = windows
    world.preempt_and_store()
    world.kept.awaits(world.tracked, 0)
    assert world.needs_landing == windows


def test_who_finds_all_on_the_device_asks_nobody(world: World) -> None:
    world.preempt_and_store()
    assert not world.kept.awaits(world.tracked, 320)
    assert world.asked == []


def test_it_goes_on_without_a_plan_that_is_late_and_a_late_plan_is_given_back(world: World) -> None:
    world.preempt_and_store()
    assert world.kept.awaits(world.tracked, 0)
    assert world.kept.holds_back(world.tracked)
    world.now += PLAN_WITHIN_S
    assert not world.kept.holds_back(world.tracked)
    assert not world.kept.awaits(world.tracked, 0)
    world.answer(plan())
    assert world.released == [OLD_LEASE, NEW_LEASE]
    assert world.tracked.plan.loads == ()


def test_a_save_that_hangs_keeps_nobody_waiting(world: World) -> None:
    world.kept.before(world.tracked)
    world.now += STORED_WITHIN_S
    assert world.kept.awaits(world.tracked, 0)
    assert len(world.asked) == 1


@pytest.mark.parametrize("again", [False, True])
def test_who_ends_or_is_preempted_again_leaves_no_lease(world: World, again: bool) -> None:
    world.preempt_and_store()
    assert world.kept.awaits(world.tracked, 0)
    if again:
        world.kept.before(world.tracked)
    else:
        world.kept.end(world.tracked)
    world.answer(plan(), 0)
    assert world.released.count(NEW_LEASE) == 1


def test_nobody_answers_and_it_is_computed(world: World) -> None:
    world.preempt_and_store()
    assert world.kept.awaits(world.tracked, 0)
    world.answer(None)
    assert not world.kept.awaits(world.tracked, 0)
    assert world.tracked.plan.loads == ()


def test_what_the_device_lacks_is_brought_ahead_once(world: World) -> None:
    world.preempt_and_store()
    world.on_device = set(world.request.block_hashes[:6])
    world.kept.ahead(world.tracked)
    world.answer(plan())
    for _ in range(3):
        world.kept.ahead(world.tracked)
    (onboarding, first), *others = world.onboarded
    assert (others, first, len(onboarding.hashes), len(onboarding.scores)) == ([], 6, 10, 10)
    world.onboarding.set_result(10)
    assert world.kept.brought_ahead == 4
    assert not world.kept.awaits(world.tracked, 320)
    world.kept.end(world.tracked)
    assert world.released == [OLD_LEASE, NEW_LEASE], "nothing was loaded under the plan"


def test_nothing_is_brought_ahead_of_what_is_there(world: World) -> None:
    world.preempt_and_store()
    world.on_device = set(world.request.block_hashes)
    world.kept.ahead(world.tracked)
    assert (world.asked, world.onboarded) == ([], [])
