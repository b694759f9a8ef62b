"""Whom the scheduler takes for the first, for a victim, for nobody: on vLLM's queue, without an engine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from kv_managers import BLOCK, CHUNK, compute, kv_manager
from kv_managers import request as hashed
from vllm import SamplingParams
from vllm.v1.core.sched.request_queue import PriorityRequestQueue
from vllm.v1.request import Request, RequestStatus

from deployments.engine.scheduling.policy_scheduler import BY_POLICY, PolicyScheduler
from kvmanager.scheduling.policies import STARVE_S, make_policy
from kvmanager.scheduling.step_time import StepTime

SLOTS = 2


class Connector:
    """Holds back whom it is told to; saves are about to free blocks when it is told so."""

    def __init__(self) -> None:
        self.held_back: set[str] = set()
        self.frees = False
        self.ahead: list[str] = []

    def holds_back(self, request_id: str) -> bool:
        return request_id in self.held_back

    def has_pending_block_frees(self) -> bool:
        return self.frees

    def bring_ahead(self, request: Request) -> None:
        self.ahead.append(request.request_id)


def scheduler(policy: str = "mlfq", free_blocks: int = 1000, windows: Sequence[int | None] = (None,)) -> Any:
    made: Any = object.__new__(PolicyScheduler)
    made.step_time = StepTime()
    made.policy_in_force = make_policy(policy, made.step_time)  # type: ignore[arg-type]
    made.jobs, made._lost, made.requests, made.running = {}, {}, {}, []
    made.waiting, made.kv_holding_waiting = PriorityRequestQueue(), PriorityRequestQueue()
    made.finished_recving_kv_req_ids, made.num_waiting_for_streaming_input = set(), 0
    made.max_num_active_reqs, made.block_size, made.connector = SLOTS, BLOCK, Connector()
    made.defer_block_free, made.fallbacks = False, 0
    made.kept_tokens = made.recomputed_tokens = 0
    made.max_num_scheduled_tokens, made.kv_cache_manager = CHUNK, kv_manager(windows, free_blocks)
    return made


def request(name: str, prompt: int = 10, answer: int = 10, at: float = 0.0) -> Request:
    params = SamplingParams(max_tokens=answer, ignore_eos=True)
    return Request(name, [1] * prompt, params, None, arrival_time=at)


def waits(made: Any, one: Request) -> Request:
    one.priority = made._enter(one)
    made.requests[one.request_id] = one
    made.waiting.add_request(one)
    return one


def runs(made: Any, one: Request, units: float = 100.0) -> Request:
    one.priority = made._enter(one)
    one.status = RequestStatus.RUNNING
    made.requests[one.request_id] = one
    made.running.append(one)
    job = made.jobs[one.request_id]
    job.since_admission = units
    made.policy_in_force.served(job, units)
    one.priority = job.key
    return one


@pytest.mark.parametrize("policy", ["mlfq", "shortest"])
def test_the_longest_of_those_that_run_makes_way_for_a_short_one(policy: str) -> None:
    made = scheduler(policy)
    runs(made, request("a", answer=40))
    long = runs(made, request("b", 2000, 900))
    assert made._victim() is None, "nobody waits"
    waits(made, request("short", answer=4))
    assert made._victim() is long
    long.status = RequestStatus.RUNNING
    made.jobs["b"].since_admission = 1.0
    made.jobs["a"].since_admission = 1.0
    assert made._victim() is None, "nobody was served long enough"


def test_nobody_makes_way_where_there_is_a_slot_and_room() -> None:
    made = scheduler()
    runs(made, request("b", 2000, 900))
    waits(made, request("short"))
    assert made._victim() is None


def test_want_of_blocks_is_want_of_room_unless_a_save_is_about_to_free_some() -> None:
    made = scheduler(free_blocks=0)
    long = runs(made, request("b", 2000, 900))
    waits(made, request("short"))
    assert made._victim() is long
    made.connector.frees = True
    assert made._victim() is None


def test_who_has_its_blocks_already_wants_only_the_rest() -> None:
    made = scheduler(free_blocks=12)
    long = runs(made, request("b", 4000, 900))
    loaded = request("l", 10 * BLOCK)
    loaded.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    loaded.priority = made._enter(loaded)
    made.requests["l"] = loaded
    made.kv_holding_waiting.add_request(loaded)
    made.finished_recving_kv_req_ids = {"l"}
    made.kv_cache_manager.allocate_slots(loaded, 9 * BLOCK, delay_cache_blocks=True)
    assert made._victim() is None
    made.kv_cache_manager = kv_manager(blocks=5)
    made.kv_cache_manager.allocate_slots(loaded, 2 * BLOCK, delay_cache_blocks=True)
    assert made._victim() is long


def test_want_of_blocks_in_any_group_of_layers_is_want_of_room() -> None:
    """A prompt of 10 blocks takes 11 of each of four groups, three of which have windows of 3 blocks."""
    for free, has_room in ((43, False), (44, True)):
        made = scheduler(free_blocks=free, windows=(96, 96, 96, None))
        long = runs(made, request("b", 4000, 900))
        waits(made, request("short", 10 * BLOCK))
        assert made._victim() is (None if has_room else long)


@pytest.mark.parametrize("windows", [(96, None), (None, 96), (96,)])
def test_a_prompt_counts_as_on_the_device_as_far_as_every_group_has_it(windows: tuple[int | None, ...]) -> None:
    """A prompt's window is kept at its end: another one that parts before finds full attention there, and no window."""
    made = scheduler(windows=windows)
    made.kv_cache_manager.free(compute(made.kv_cache_manager, hashed("stored", 40 * BLOCK + 1)))
    assert made._on_device(hashed("same", 40 * BLOCK + 9)) == 40 * BLOCK
    assert made._on_device(hashed("parts", 30 * BLOCK + 9)) == 0
    assert made._enter(hashed("parts", 30 * BLOCK + 9)) is not None
    assert made.jobs["parts"].left_tokens == 30 * BLOCK + 9


def test_who_waits_for_a_load_a_plan_or_a_grammar_is_not_the_first_and_whose_load_has_ended_is() -> None:
    made = scheduler()
    one, other, grammar = (waits(made, request(name, at=at)) for name, at in (("a", 1.0), ("b", 2.0), ("g", 0.0)))
    grammar.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
    assert made._first() is one
    made.connector.held_back = {"a"}
    assert made._first() is other
    loaded = request("l")
    loaded.status = RequestStatus.WAITING_FOR_REMOTE_KVS
    loaded.priority = made._enter(loaded)
    made.kv_holding_waiting.add_request(loaded)
    assert made._first() is other
    made.finished_recving_kv_req_ids = {"l"}
    assert made._first() is loaded


def test_who_has_waited_too_long_comes_to_the_front_of_vllms_heap() -> None:
    made = scheduler()
    old = waits(made, request("old", 4000, at=-1.0))
    for number in range(5):
        waits(made, request(f"{number}", at=number))
    assert made.waiting.peek_request() is not old
    late = made._late(made.jobs["old"].waiting_since + STARVE_S + 60)
    for one in late:
        made._requeue(one)
    assert {one.request_id for one in late} == {"old", "0", "1", "2", "3", "4"}
    assert [made.waiting.pop_request().request_id for _ in range(6)] == ["old", "0", "1", "2", "3", "4"]


def planned(tokens: dict[str, int], computed: dict[str, int], resumed: set[str]) -> Any:
    cached = SimpleNamespace(
        req_ids=list(computed), num_computed_tokens=list(computed.values()), resumed_req_ids=resumed
    )
    return SimpleNamespace(num_scheduled_tokens=tokens, scheduled_cached_reqs=cached, scheduled_new_reqs=[])


def test_who_is_served_falls_to_a_later_level_and_what_came_back_is_counted() -> None:
    made = scheduler()
    one = runs(made, request("a", 100, 50), units=0.0)
    before = one.priority
    for _ in range(200):
        made._charge(planned({"a": 1}, {"a": 100}, set()))
    assert one.priority > before
    made._lost["a"] = 120
    made._charge(planned({"a": 30}, {"a": 96}, {"a"}))
    made._charge(planned({"a": 1}, {"a": 126}, set()))
    assert (made.kept_tokens, made.recomputed_tokens) == (96, 24)


def test_the_next_two_preempted_ones_are_brought_ahead() -> None:
    made = scheduler()
    for number in range(5):
        waits(made, request(f"{number}", at=number))
    made._lost = {"1": 100, "3": 100, "4": 100}
    made._bring_ahead()
    assert made.connector.ahead == ["1", "3"]


def test_what_a_preempted_request_was_about_to_compute_is_in_nobodys_prefix_cache() -> None:
    made = scheduler()
    one = runs(made, request("a", 10 * BLOCK))
    made.running.remove(one)
    one.num_computed_tokens = 4 * BLOCK + 7  # and in this step the rest, which vLLM has let into its cache already
    evicted: set[int] = set()
    pool = SimpleNamespace(
        blocks=[SimpleNamespace(block_id=n, block_hash=n if n not in (0, 19, 29) else None) for n in range(30)],
        evict_blocks=evicted.update,
    )
    freed: list[str] = []
    made.kv_cache_manager = SimpleNamespace(
        block_pool=pool,
        get_block_ids=lambda name: (list(range(10, 20)), [0] * 5 + list(range(25, 30)), list(range(20, 25))),
        coordinator=SimpleNamespace(single_type_managers=[SimpleNamespace(block_size=n * BLOCK) for n in (1, 1, 2)]),
        free=lambda r: freed.append(r.request_id),
    )
    made.encoder_cache_manager = SimpleNamespace(free=lambda r: None)
    made.aux_output_connector, made._inflight_prefills, made.log_stats = None, set(), False
    made.reset_preempted_req_ids, made.prev_step_scheduled_req_ids = set(), {"a"}
    made.preempted, made._why = Counter(), BY_POLICY

    made._preempt_request(one, 1.0)

    assert evicted == {*range(14, 19), *range(25, 29), *range(22, 25)}, (
        "of each group of layers; one has lost its first blocks, and one has blocks twice as long"
    )
    assert freed == ["a"]
    assert made.waiting.peek_request() is one


def test_levels_are_counted_of_whoever_waits() -> None:
    made = scheduler()
    assert made.waiting_by_level() == {0: 0}
    for number, prompt in enumerate((10, 20, 4000)):
        waits(made, request(f"{number}", prompt))
    assert made.waiting_by_level() == {0: 2, 2: 1}


def test_a_decision_that_fails_is_counted_and_has_an_answer() -> None:
    made = scheduler()

    def fails() -> str:
        raise ValueError

    assert made._fenced(fails, BY_POLICY) == BY_POLICY
    assert made.fallbacks == 1
