"""Steps are timed and held to a target by what vLLM reads anew in each; whatever fails leaves vLLM's own length."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from configs.settings import Settings, load_settings
from deployments.engine.scheduling.options import POLICY_SCHEDULER, SchedulingOptions, scheduling_arguments
from deployments.engine.scheduling.steps import StepWatch, steps_of, watch_steps
from kvmanager.scheduling.step_budget import StepBudget
from kvmanager.scheduling.step_time import StepTime

ONCE_S, DECODE_S, TOKEN_S = 4e-3, 5e-4, 1e-4


class FakeScheduler:
    """Four requests decode, one long prompt is prefilled; time passes as the constants say."""

    def __init__(self, target_s: float | None, decoders: int = 4) -> None:
        self.max_num_scheduled_tokens = 512
        self.block_size = 32
        options = {} if target_s is None else {"crosskv_scheduling": {"tpot_target_s": target_s}}
        self.vllm_config = SimpleNamespace(additional_config=options)
        self.now = 50.0
        self.prefilled = 0
        self.running = [SimpleNamespace(is_prefill_chunk=False, num_computed_tokens=100) for _ in range(decoders)]
        self.running.append(SimpleNamespace(is_prefill_chunk=True, num_computed_tokens=0))
        self.took: list[float] = []
        self.loads = False

    def schedule(self) -> Any:
        decoders = len(self.running) - 1
        tokens = {f"{n}": 1 for n in range(decoders)} | {"p": self.max_num_scheduled_tokens - decoders}
        names = list(tokens)
        computed = [r.num_computed_tokens for r in self.running]
        cached = SimpleNamespace(req_ids=names, num_computed_tokens=computed, resumed_req_ids=set())
        return SimpleNamespace(
            num_scheduled_tokens=tokens,
            scheduled_new_reqs=[],
            scheduled_cached_reqs=cached,
            has_sync_kv_loads=self.loads,
        )

    def update_from_output(self, planned: Any) -> str:
        prefill = planned.num_scheduled_tokens["p"]
        seconds = ONCE_S + DECODE_S * (len(self.running) - 1) + TOKEN_S * prefill
        self.took.append(seconds)
        self.now += seconds
        self.running[-1].num_computed_tokens += prefill
        return "outputs"


def watched(target_s: float | None, decoders: int = 4) -> tuple[Any, StepWatch]:
    scheduler: Any = FakeScheduler(target_s, decoders)
    step_time = StepTime()
    budget = StepBudget(target_s, 512, 32, step_time) if target_s else None
    watch = StepWatch(scheduler, step_time, budget, lambda: scheduler.now)
    watch.watch()
    return scheduler, watch


def test_steps_come_to_the_target_and_stay_below_the_ceiling() -> None:
    scheduler, watch = watched(0.02)
    for _ in range(60):
        assert scheduler.update_from_output(scheduler.schedule()) == "outputs"
    assert scheduler.took[0] == pytest.approx(0.0568), "nothing is known: as long as ever"
    assert max(scheduler.took[20:]) <= 0.02
    assert min(scheduler.took[20:]) >= 0.012
    assert (watch.budget_tokens - 4) % 32 == 0
    assert watch.slice_s() == 0.01


def test_a_step_that_waits_for_a_load_says_nothing_of_what_computing_takes() -> None:
    scheduler, watch = watched(0.02)
    scheduler.loads = True
    for _ in range(20):
        scheduler.update_from_output(scheduler.schedule())
    assert not watch.time.known


def test_a_step_without_decoders_is_as_long_as_ever() -> None:
    scheduler, watch = watched(0.02, decoders=0)
    for _ in range(20):
        scheduler.update_from_output(scheduler.schedule())
    assert watch.budget_tokens == 512
    assert watch.slice_s() is None


def test_what_passes_between_two_steps_is_taken_off_and_an_idle_engine_is_not_between() -> None:
    scheduler, watch = watched(0.02)
    for _ in range(40):
        scheduler.update_from_output(scheduler.schedule())
    before = watch.budget_tokens
    scheduler.now += 100.0
    scheduler.update_from_output(scheduler.schedule())
    assert watch.budget_tokens == before
    for _ in range(30):
        scheduler.now += 0.005
        scheduler.update_from_output(scheduler.schedule())
    assert watch.budget_tokens <= before - 32


def test_a_budget_that_raises_is_counted_and_steps_are_as_long_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler, watch = watched(0.02)
    for _ in range(40):
        scheduler.update_from_output(scheduler.schedule())
    assert scheduler.max_num_scheduled_tokens < 512
    monkeypatch.setattr(StepBudget, "tokens", lambda *_: 1 / 0)
    planned = scheduler.schedule()
    assert planned.num_scheduled_tokens["p"] == 508
    assert scheduler.update_from_output(planned) == "outputs"
    assert watch.failures == 1


def test_an_engine_that_nobody_asked_for_anything_is_left_alone() -> None:
    scheduler: Any = FakeScheduler(None)
    assert watch_steps(scheduler) is None
    assert steps_of(scheduler) is None
    assert "schedule" not in vars(scheduler)
    asked: Any = FakeScheduler(0.5)
    assert watch_steps(asked) is steps_of(asked)


def settings(**engine: Any) -> Settings:
    return load_settings({"engine": engine})


def test_settings_that_ask_for_nothing_change_no_argument() -> None:
    assert scheduling_arguments(settings(), {}) == {}


def test_a_policy_takes_vllms_queue_by_priority_and_a_target_alone_leaves_its_scheduler() -> None:
    mine = scheduling_arguments(settings(scheduler="mlfq"), {"additional_config": {"theirs": 1}})
    assert (mine["scheduler_cls"], mine["scheduling_policy"]) == (POLICY_SCHEDULER, "priority")
    assert mine["additional_config"]["theirs"] == 1
    assert SchedulingOptions.read(SimpleNamespace(**mine)) == SchedulingOptions("mlfq", None)
    target = scheduling_arguments(settings(tpot_target_s=0.05), {})
    assert set(target) == {"additional_config"}
    assert SchedulingOptions.read(SimpleNamespace(**target)) == SchedulingOptions("fcfs", 0.05)
