"""Which segments of a device are worth a copy that no shared tier has."""

from __future__ import annotations

import random

import pytest

from kvmanager.config import ManagerConfig
from kvmanager.index.locations import REDIS, Location, Tier
from kvmanager.manager import KVManager
from kvmanager.moves import offloads
from kvmanager.moves.plan import PlanQuery
from kvmanager.segments.keys import BlockHash
from kvmanager.segments.spans import SegmentSpan, split_segments

CUT = 4
HERE = Location(Tier.CPU, "node")


def sequence(seed: int, blocks: int) -> list[BlockHash]:
    draw = random.Random(seed)
    return [BlockHash(draw.randbytes(32)) for _ in range(blocks)]


def spans_of(hashes: list[BlockHash], prompt_blocks: int | None = None) -> list[SegmentSpan]:
    return split_segments(hashes, 0, len(hashes), CUT, len(hashes) if prompt_blocks is None else prompt_blocks)


@pytest.fixture
def manager() -> KVManager:
    made = KVManager(ManagerConfig(blocks_per_segment=CUT, half_life_requests=100), epoch=1)
    made.set_budget(HERE, 1000)
    return made


def save(manager: KVManager, hashes: list[BlockHash], segments: int | None = None) -> list[SegmentSpan]:
    spans = spans_of(hashes)[:segments]
    offer = manager.offer(0.0, "replica", HERE, spans, [1] * len(spans))
    manager.commit(0.0, HERE, offer.keys, [1] * len(offer.keys))
    return spans


def lose_all(manager: KVManager) -> None:
    manager.clear({Tier.CPU})


def all_candidates(manager: KVManager, most_segments: int = 100) -> list[list[SegmentSpan]]:
    """One round over the replica's device."""
    calls = 1 + len(manager.offloads._devices.held("replica")) // offloads.MOST_LOOKED_AT
    found = [manager.offloads.candidates("replica", most_segments, HERE) for _ in range(calls)]
    return [spans for spans in found if spans]


def test_what_lies_in_a_tier_is_no_candidate(manager: KVManager) -> None:
    hashes = sequence(1, 12)
    save(manager, hashes)
    manager.device_stored("replica", hashes)
    assert all_candidates(manager) == []
    assert manager.offloads.lacking("replica", hashes, HERE) == []


def test_what_a_tier_has_lost_is_offloaded_with_its_chain(manager: KVManager) -> None:
    hashes = sequence(2, 12)
    spans = save(manager, hashes)
    manager.device_stored("replica", hashes)
    lose_all(manager)
    assert all_candidates(manager) == [spans]
    assert manager.offloads.lacking("replica", hashes, HERE) == spans


def test_what_lay_on_the_device_when_the_tiers_were_cleared_is_left_out(manager: KVManager) -> None:
    hashes, later = sequence(11, 8), sequence(12, 4)
    spans = save(manager, hashes)
    manager.device_stored("replica", hashes)
    manager.offloads.leave_out_present()
    lose_all(manager)
    new = save(manager, later)
    manager.device_stored("replica", later)
    lose_all(manager)
    assert all_candidates(manager) == [new]
    assert manager.offloads.lacking("replica", hashes, HERE) == spans, "by order it is offloaded all the same"
    manager.device_stored("other", hashes)
    assert manager.offloads.candidates("other", 8, HERE) == spans, "on another device it came later"


def test_only_what_the_tier_lacks_is_named_and_no_more_than_asked(manager: KVManager) -> None:
    hashes = sequence(3, 16)
    spans = save(manager, hashes)
    manager.dropped(0.0, HERE, [spans[2].key])  # and what hangs on it
    manager.device_stored("replica", hashes)
    assert manager.offloads.lacking("replica", hashes, HERE) == spans[2:]
    manager.device_removed("replica", hashes[12:])
    assert manager.offloads.lacking("replica", hashes, HERE) == spans[2:3]
    assert all_candidates(manager, most_segments=1) == [spans[2:3]]


def test_a_parent_that_only_redis_has_goes_to_the_cpu_tier_with_what_follows_it(manager: KVManager) -> None:
    manager.set_budget(REDIS, 1000)
    hashes = sequence(13, 16)
    spans = save(manager, hashes, segments=2)
    demotion = manager.next_demotion(0.0, 100)
    assert demotion is not None
    manager.finish_demotion(0.0, demotion.demotion_id, dict.fromkeys(demotion.keys, 1))
    manager.dropped(0.0, HERE, [spans[0].key])  # and what hangs on it
    assert manager.offer(0.0, "replica", HERE, spans_of(hashes)[2:], [1, 1]).keys == ()
    manager.device_stored("replica", hashes)

    assert all_candidates(manager, most_segments=1) == [spans_of(hashes)[:3]]
    assert manager.offloads.lacking("replica", hashes, HERE) == spans_of(hashes)
    assert manager.offloads.lacking("replica", hashes, REDIS) == spans_of(hashes)[2:]
    assert manager.offer(0.0, "replica", HERE, spans_of(hashes), [1] * 4).keys == tuple(
        span.key for span in spans_of(hashes)
    )


def test_what_is_not_hot_is_not_worth_it(manager: KVManager) -> None:
    hashes = sequence(4, 4)
    spans = save(manager, hashes)
    manager.device_stored("replica", hashes)
    lose_all(manager)
    for _ in range(10):
        manager.plan(0.0, "other", "node", PlanQuery([]))  # time passes
    assert all_candidates(manager) == []
    manager.plan(0.0, "other", "node", PlanQuery(hashes))
    assert all_candidates(manager) == [spans]


def test_the_hottest_of_those_looked_at_comes_first(manager: KVManager) -> None:
    cold, hot = sequence(5, 4), sequence(6, 4)
    save(manager, cold)
    spans = save(manager, hot)
    manager.device_stored("replica", [*hot, *cold])
    lose_all(manager)
    manager.plan(0.0, "other", "node", PlanQuery(hot))
    assert all_candidates(manager)[0] == spans


def test_one_call_looks_at_a_bounded_number_of_blocks_and_a_round_at_all(
    manager: KVManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offloads, "MOST_LOOKED_AT", 8)
    hashes = sequence(7, 4)
    spans = save(manager, hashes)
    manager.device_stored("replica", [*sequence(8, 60), *hashes])
    lose_all(manager)
    looked = manager.offloads._trie.nodes

    class Counted(dict):  # type: ignore[type-arg]
        asked = 0

        def get(self, key: object, default: object = None) -> object:
            Counted.asked += 1
            return super().get(key, default)

    manager.offloads._trie.nodes = Counted(looked)
    found = [manager.offloads.candidates("replica", 9, HERE) for _ in range(8)]
    assert Counted.asked == 64
    assert [spans] == [one for one in found if one]


def test_what_the_index_does_not_know_is_cut_at_the_fixed_cuts(manager: KVManager) -> None:
    hashes = sequence(9, 14)
    manager.device_stored("replica", hashes)
    assert manager.offloads.lacking("replica", hashes, HERE) == spans_of(hashes)
    manager.device_removed("replica", hashes[11:])  # the rest of a segment is worth nothing by itself
    assert manager.offloads.lacking("replica", hashes, HERE) == spans_of(hashes)[:2]
    assert manager.offloads.lacking("stranger", hashes, HERE) == []
    assert manager.offloads.candidates("stranger", 8, HERE) == []


def test_a_reservation_leases_what_a_plan_would_load_and_counts_nothing(manager: KVManager) -> None:
    hashes = sequence(10, 8)
    spans = save(manager, hashes)
    before = manager.lookup(hashes)["segments"], manager.stats(0.0)["counters"]

    reserved = manager.reserve(0.0, "replica", "node", hashes)

    assert [segment.key for segment in reserved.segments] == [span.key for span in spans]
    assert (manager.lookup(hashes)["segments"], manager.stats(0.0)["counters"]) == before
    assert manager.stats(0.0)["leases"] == 1
    assert manager.clear({Tier.CPU}) == (), "leased"
    manager.release(reserved.lease_id)
    assert sum(len(directive.keys) for directive in manager.expire(0.0)) == 2
