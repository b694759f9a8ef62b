"""Every part fails, with streams running: no wrong token, no lost request, and it comes back."""

from __future__ import annotations

import contextlib

import psutil
import pytest

from load_tests.faults.catalogue import BLEND_FAULTS, FAULTS, PAIRED_FAULTS, SURROUNDING_FAULTS, Fault, World
from load_tests.faults.trial import Trials
from load_tests.harness.server import RunningServer
from tests.sizes import STREAMED_TOKENS, STREAMS

pytestmark = pytest.mark.server

MORE_FILES = 12
"""File descriptors that a process may have more than before: connections come and go, leaks of a fault add up."""
ELSEWHERE = {
    "Redis: restarted empty": pytest.mark.long(
        "tests/deployments/redis_tier/test_redis_tier.py::test_a_redis_that_was_restarted_empty_is_a_new_life"
    ),
    "Redis: answers after 1 s": pytest.mark.long(
        "tests/deployments/together/test_three_tiers.py"
        "::test_a_redis_that_hangs_costs_its_deadline_and_is_then_not_asked"
    ),
    "Redis: half-open connection": pytest.mark.long(
        "tests/deployments/segment_store/test_redis_connection.py::test_what_never_answers_is_asked_once"
    ),
    "Redis: out of memory": pytest.mark.long(
        "tests/deployments/together/test_three_tiers.py"
        "::test_a_redis_that_is_full_keeps_what_it_has_and_takes_more_when_it_has_room"
    ),
    "CPU tier: hangs": pytest.mark.long(
        "tests/deployments/port/test_cluster_port.py"
        "::test_a_tier_that_hangs_costs_no_more_than_the_deadline_and_loses_nothing"
    ),
    "CPU tier: budget shrunk": pytest.mark.long(
        "tests/deployments/together/test_three_tiers.py::test_a_shrunk_budget_keeps_heads_of_chains_and_the_books_agree"
    ),
    "CPU tier: object lost": pytest.mark.long(
        "tests/deployments/port/test_cluster_port.py::test_a_lost_object_is_reported_lost"
    ),
    "prefetch worker: killed mid-segment": pytest.mark.long(
        "tests/deployments/together/test_three_tiers.py::test_killed_workers_cost_the_load_and_are_started_again"
    ),
    "manager: hangs": pytest.mark.long(
        "tests/deployments/port/test_cluster_port.py"
        "::test_a_manager_that_hangs_is_waited_for_a_second_three_times_and_then_not_asked"
    ),
    "manager: replies lost": pytest.mark.long(
        "tests/deployments/transfer/test_after_saves.py::test_an_answer_that_comes_too_late_harms_nobody"
    ),
    "replica: killed mid-stream": pytest.mark.long(
        "tests/end_to_end/replicas/test_keys_and_roles.py::test_answers_that_are_handed_over_are_the_undisturbed_ones"
    ),
    "replica: engine hangs": pytest.mark.long(
        "tests/deployments/engine/test_heartbeat.py"
        "::test_an_engine_that_hangs_ends_its_requests_refuses_new_ones_and_stays_dead"
    ),
}
"""Faults whose mechanism a cheaper test holds. The others are one for each mechanism."""
AROUND = {
    "HAProxy": pytest.mark.long(
        "tests/app/launch/test_haproxy.py::test_a_dead_haproxys_place_is_taken_until_ray_starts_another_one"
    ),
    "pair": pytest.mark.long(
        "tests/end_to_end/test_faults.py::test_a_fault_costs_no_token_and_no_request_and_the_part_rejoins"
    ),
}
SPARED = pytest.mark.long(
    "tests/deployments/protocol/test_log_lines.py::test_vllm_leaves_serves_log_alone_whatever_the_environment_says"
)
TRIED = [
    *(
        pytest.param(fault, id=name, marks=[ELSEWHERE[name]] if name in ELSEWHERE else [])
        for fault in FAULTS
        for name in [f"{fault.part}: {fault.name}"]
    ),
    *(
        pytest.param(fault, id=f"{fault.part}: {fault.name}", marks=[AROUND.get(fault.part, SPARED)])
        for fault in (*SURROUNDING_FAULTS, *PAIRED_FAULTS)
    ),
]


def open_files(server: RunningServer) -> dict[str, int]:
    """Most open file descriptors of any one process, by the process's title without what it is doing now."""
    most: dict[str, int] = {}
    for process in server.launcher.children(recursive=True):
        with contextlib.suppress(psutil.Error):
            title = " ".join(process.cmdline()).split(".")[0].split(" ")[0]
            if title.startswith("ray::"):
                most[title] = max(most.get(title, 0), process.num_fds())
    return most


@pytest.fixture(scope="module")
def trials(world: World) -> Trials:
    return Trials(world, "demo", 3, STREAMS, STREAMED_TOKENS)


@pytest.fixture(scope="module")
def files_before(trials: Trials, world: World) -> dict[str, int]:
    """The most open file descriptors of a process, by its title, before the first fault."""
    world.server.wait_until_idle()
    return open_files(world.server)


@pytest.mark.parametrize("fault", TRIED)
def test_a_fault_costs_no_token_and_no_request_and_the_part_rejoins(
    fault: Fault, trials: Trials, files_before: dict[str, int]
) -> None:
    outcome = trials.run(fault)
    assert outcome.problems == []


@pytest.fixture(scope="module")
def blended_trials(world: World) -> Trials:
    return Trials(world, "demo", 5, STREAMS, STREAMED_TOKENS, blended=True)


@pytest.mark.long("tests/deployments/engine/load_paths/blending/test_blend_failures.py")
@pytest.mark.parametrize("fault", BLEND_FAULTS, ids=lambda fault: fault.name)
def test_a_fault_costs_a_blended_prompt_no_token(
    fault: Fault, blended_trials: Trials, files_before: dict[str, int]
) -> None:
    outcome = blended_trials.run(fault)
    assert outcome.problems == []


def test_after_all_faults_nothing_has_piled_up(trials: Trials, world: World, files_before: dict[str, int]) -> None:
    server = world.server
    server.wait_until_idle()

    files = open_files(server)
    grown = {title: (files_before[title], count) for title, count in files.items() if title in files_before}
    assert {title: pair for title, pair in grown.items() if pair[1] > pair[0] + MORE_FILES} == {}
    assert server.metric("crosskv_pulls_in_flight") == 0

    def agree() -> bool:
        stats = server.stats()
        (tier,) = stats["cpu_tiers"].values()
        (books,) = [location for location in stats["locations"] if location["tier"] == "cpu"]
        (redis,) = [location for location in stats["locations"] if location["tier"] == "redis"]
        found = len(world.redis.segment_keys()), world.redis.segment_bytes()
        return (tier["segments"], tier["used_bytes"], *found) == (
            books["segments"], books["bytes"], redis["segments"], redis["bytes"],
        )  # fmt: skip

    server.wait_until(agree, "what the tiers have evicted is gone, and the books are those of what there is")
