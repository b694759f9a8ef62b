"""Every part fails in every way, with streams running: no wrong token, no lost request, and it comes back."""

from __future__ import annotations

import pytest

from load_tests.faults.catalogue import BLEND_FAULTS, FAULTS, Fault, World
from load_tests.faults.trial import Trials
from tests.sizes import BLEND_FAULTS_TRIED, STREAMED_TOKENS, STREAMS

pytestmark = pytest.mark.server

MORE_FILES = 12
"""File descriptors that a process may have more than before: connections come and go, leaks of a fault add up."""


@pytest.fixture(scope="module")
def trials(world: World) -> Trials:
    return Trials(world, "demo", 3, STREAMS, STREAMED_TOKENS)


@pytest.fixture(scope="module")
def files_before(trials: Trials, world: World) -> dict[str, int]:
    """The most open file descriptors of a process, by its title, before the first fault."""
    world.server.wait_until_idle()
    return world.server.open_files()


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: f"{fault.part}: {fault.name}")
def test_a_fault_costs_no_token_and_no_request_and_the_part_rejoins(
    fault: Fault, trials: Trials, files_before: dict[str, int]
) -> None:
    outcome = trials.run(fault)
    assert outcome.problems == []


@pytest.fixture(scope="module")
def blended_trials(world: World) -> Trials:
    return Trials(world, "demo", 5, STREAMS, STREAMED_TOKENS, blended=True)


@pytest.mark.parametrize("fault", BLEND_FAULTS[:BLEND_FAULTS_TRIED], ids=lambda fault: fault.name)
def test_a_fault_costs_a_blended_prompt_no_token(
    fault: Fault, blended_trials: Trials, files_before: dict[str, int]
) -> None:
    outcome = blended_trials.run(fault)
    assert outcome.problems == []


def test_after_all_faults_nothing_has_piled_up(trials: Trials, world: World, files_before: dict[str, int]) -> None:
    server = world.server
    server.wait_until_idle()

    files = server.open_files()
    grown = {title: (files_before[title], count) for title, count in files.items() if title in files_before}
    assert {title: pair for title, pair in grown.items() if pair[1] > pair[0] + MORE_FILES} == {}
    assert server.metric("crosskv_pulls_in_flight") == 0
    stats = server.stats()
    (tier,) = stats["cpu_tiers"].values()
    (books,) = [location for location in stats["locations"] if location["tier"] == "cpu"]
    assert (tier["segments"], tier["used_bytes"]) == (books["segments"], books["bytes"])
    (redis,) = [location for location in stats["locations"] if location["tier"] == "redis"]
    assert (len(world.redis.segment_keys()), world.redis.segment_bytes()) == (redis["segments"], redis["bytes"])
