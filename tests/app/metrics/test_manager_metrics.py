"""The manager's figures as Prometheus text: everything that is there, and no failure over what is not."""

from __future__ import annotations

import math
from typing import Any

import pytest

from app.metrics.manager import manager_families
from kvmanager.config import ManagerConfig
from kvmanager.index.locations import Location, Tier
from kvmanager.manager import KVManager
from kvmanager.scaling.book import ScalingBook

NODE = "0123456789abcdef"
TIER = {
    "segments": 5, "pulls_in_flight": 2, "promoted": 3, "demoted": 4, "pull_failures": {"missing": 6, "timeout": 7},
    "redis_circuit": "half_open", "redis_circuit_opened": 8, "workers": 9,
}  # fmt: skip
REDIS = {"state": "ok", "used_memory_bytes": 10, "maxmemory_bytes": 11}


def samples(stats: dict[str, Any]) -> dict[str, float]:
    found = {}
    for family in manager_families(stats):
        for sample in family.samples:
            labels = ",".join(f"{name}={value}" for name, value in sorted(sample.labels.items()))
            found[f"{sample.name}{{{labels}}}"] = sample.value
    return found


def brain_stats() -> dict[str, Any]:
    brain = KVManager(ManagerConfig(blocks_per_segment=8), epoch=1)
    brain.set_budget(Location(Tier.CPU, NODE), 4096)
    return brain.stats(0.0)


def test_the_brains_own_figures_are_there():
    found = samples(brain_stats())
    assert found["crosskv_index_nodes{}"] == 0
    assert found["crosskv_tier_budget_bytes{holder=01234567,tier=cpu}"] == 4096
    assert found["crosskv_manager_plans_total{}"] == 0


def test_demotions_and_new_counters_are_shown():
    stats = {**brain_stats(), "demotions": 2, "demotion_queue": 3, "counters": {"moved_segments": 4}}
    found = samples(stats)
    assert found["crosskv_index_demotions{}"] == 2
    assert found["crosskv_index_demotion_queue{}"] == 3
    assert found["crosskv_manager_moved_segments_total{}"] == 4


def test_ended_replicas_are_counted_by_why():
    found = samples({**brain_stats(), "replicas_ended": {"dead": 1, "hung": 2}})
    assert found["crosskv_replicas_ended_total{why=dead}"] == 1
    assert found["crosskv_replicas_ended_total{why=hung}"] == 2
    assert samples({"replicas_ended": {}})["crosskv_replicas_ended_total{why=dead}"] == 0, "before the first, too"


def test_every_node_says_how_it_gets_on_with_redis():
    found = samples({**brain_stats(), "cpu_tiers": {NODE: TIER}})
    assert found["crosskv_pulls_in_flight{node=01234567}"] == 2
    assert found["crosskv_promoted_segments_total{node=01234567}"] == 3
    assert found["crosskv_demoted_segments_total{node=01234567}"] == 4
    assert found["crosskv_pull_failures_total{node=01234567,reason=missing}"] == 6
    assert found["crosskv_pull_failures_total{node=01234567,reason=timeout}"] == 7
    assert found["crosskv_circuit_opened_total{node=01234567,tier=redis}"] == 8
    assert found["crosskv_prefetch_workers{node=01234567}"] == 9


@pytest.mark.parametrize(("state", "value"), [("closed", 0), ("half_open", 1), ("open", 2)])
def test_the_circuits_state_is_a_number(state: str, value: int):
    found = samples({"cpu_tiers": {NODE: {"redis_circuit": state}}})
    assert found["crosskv_circuit_state{node=01234567,tier=redis}"] == value


@pytest.mark.parametrize(("redis", "up"), [(REDIS, 1), ({**REDIS, "state": "gone"}, 0), ({"error": "timeout"}, 0)])
def test_redis_is_up_or_not(redis: dict[str, Any], up: int):
    assert samples({"redis": redis})["crosskv_redis_up{}"] == up


def test_the_memory_of_redis_is_shown():
    found = samples({"redis": REDIS})
    assert (found["crosskv_redis_used_memory_bytes{}"], found["crosskv_redis_maxmemory_bytes{}"]) == (10, 11)


def test_what_the_index_refused_and_what_left_for_room_is_counted():
    found = samples({"redis": {**REDIS, "unusable": 3, "neighbours": 5, "neighbours_gone": 2}})
    assert found["crosskv_redis_unusable_segments_total{}"] == 3
    assert (found["crosskv_redis_neighbours{}"], found["crosskv_redis_neighbours_gone_total{}"]) == (5, 2)


@pytest.mark.parametrize(
    "stats",
    [
        {},
        {"redis": None},
        {"cpu_tiers": {NODE: {"error": "timeout"}}},
        {"cpu_tiers": {NODE: {"redis_circuit": "ajar", "pull_failures": None, "promoted": "many"}}},
        {"cpu_tiers": None, "locations": None, "counters": None, "demotions": {"now": 1}},
        {"locations": [{"tier": "cpu"}, 5]},
    ],
    ids=str,
)
def test_what_is_missing_or_is_no_number_is_left_out(stats: dict[str, Any]):
    assert samples(stats) == {}


def test_a_tier_that_does_not_answer_hides_no_other():
    found = samples({"cpu_tiers": {"a" * 8: {"error": "timeout"}, "b" * 8: TIER}, "redis": REDIS})
    assert found["crosskv_pulls_in_flight{node=bbbbbbbb}"] == 2
    assert "crosskv_pulls_in_flight{node=aaaaaaaa}" not in found


def test_chunks_asked_for_and_found_are_shown_with_their_rate():
    stats = {"counters": {"chunk_tokens_asked": 200, "chunk_tokens_found": 150, "plans": 3}}
    found = samples(stats)
    assert found["crosskv_chunk_tokens_total{outcome=asked}"] == 200
    assert found["crosskv_chunk_tokens_total{outcome=found}"] == 150
    assert found["crosskv_blend_hit_rate{}"] == 0.75
    assert not [name for name in found if name.startswith("crosskv_manager_chunk")]


def test_a_share_of_nothing_is_shown_as_what_it_is():
    assert math.isnan(samples(brain_stats())["crosskv_blend_hit_rate{}"])


def test_how_many_replicas_are_wanted_and_why():
    book = ScalingBook()
    book.hear(0.0, 2, 1, 1, "kv_pressure", {"kv_pressure": 1.4, "ongoing": 0.5})
    book.hear(1.0, 2, 2, 1, "enough", {"kv_pressure": 1.4, "ongoing": 0.5})
    found = samples({"scaling": book.report(2.0)})
    assert found == {
        "crosskv_replicas_desired{}": 2,
        "crosskv_replicas_target{}": 2,
        "crosskv_replicas_running{}": 1,
        "crosskv_replicas_demand{by=kv_pressure}": 1.4,
        "crosskv_replicas_demand{by=ongoing}": 0.5,
        "crosskv_replicas_changed_total{direction=up,why=kv_pressure}": 1,
    }
    assert samples({"scaling": {}}) == {}
