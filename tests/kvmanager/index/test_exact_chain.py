"""A tolerant prompt reads what is stored of its exact twin where that reaches further; never the reverse."""

from __future__ import annotations

from kvmanager.index.deltas import Deltas, Part
from kvmanager.index.locations import Tier
from kvmanager.moves.plan import PlanQuery, PlanReason
from kvmanager.routing.mirror import PlacementMirror, TierHits
from kvmanager.segments.keys import block_hashes
from kvmanager.segments.spans import split_segments


def tolerant_hashes(text):
    return block_hashes([ord(letter) for letter in text], 1, "tolerant")


def plan(brain, text):
    """A tolerant prompt's plan."""
    return brain.manager.plan(
        brain.now, "replica", "node", PlanQuery(tolerant_hashes(text), exact_hashes=brain.hashes(text))
    )


def store(brain, text):
    """Store a prompt under its tolerant names."""
    spans = split_segments(tolerant_hashes(text), 0, len(text), 2, len(text))
    offer = brain.manager.offer(brain.now, "replica", brain.cpu, spans, [1] * len(spans))
    brain.commit(offer.keys)
    return offer.keys


def test_the_exact_twin_is_read_under_its_own_keys_where_it_reaches_further(brain):
    brain.serve("abcdef")
    store(brain, "ab")
    found = plan(brain, "abcdef")

    assert [segment.key for segment in found.segments] == list(brain.keys("abcdef"))
    assert found.reason is PlanReason.HIT
    assert [end for end, _ in found.scores] == [2, 4, 6]


def test_the_prompts_own_chain_is_read_where_it_reaches_as_far(brain):
    brain.serve("abcd")
    own = store(brain, "abcd")

    assert [segment.key for segment in plan(brain, "abcdef").segments] == list(own)


def test_of_two_chains_that_reach_as_far_the_nearer_one_is_read(tiered):
    spans = split_segments(tolerant_hashes("abcd"), 0, 4, 2, 4)
    tiered.manager.adopt(0, tiered.redis, spans, [1, 1])
    own = [span.key for span in spans]
    assert [segment.key for segment in plan(tiered, "abcd").segments] == own

    tiered.serve("abcd")
    assert [segment.key for segment in plan(tiered, "abcd").segments] == list(tiered.keys("abcd"))
    store(tiered, "abcd")
    assert [segment.key for segment in plan(tiered, "abcd").segments] == own


def test_what_of_the_twin_is_planned_is_leased(brain):
    brain.serve("abcd")
    found = plan(brain, "abcd")
    brain.manager.clear({Tier.CPU})

    assert brain.manager.stats(brain.now)["leases"] == 1
    assert brain.manager.stats(brain.now)["locations"][0]["bytes"] == 2, "leased bytes stay until the lease ends"
    brain.manager.release(found.lease_id)
    brain.manager.expire(brain.now)
    assert brain.manager.stats(brain.now)["locations"][0]["bytes"] == 0


def test_an_exact_prompt_finds_nothing_that_is_stored_under_tolerant_names(brain):
    store(brain, "abcdef")

    assert brain.plan("abcdef").reason is PlanReason.COLD
    assert brain.manager.lookup(brain.hashes("abcdef"))["cpu"] == 0


def test_after_a_turn_from_the_twin_the_conversation_goes_on_under_its_own_names(brain):
    """As the connector does: what came from the twin is offered from the first block on."""
    brain.serve("abcd")
    assert [segment.key for segment in plan(brain, "abcd").segments] == list(brain.keys("abcd"))
    own = store(brain, "abcdef")  # prompt and answer

    assert [segment.key for segment in plan(brain, "abcdefgh").segments] == list(own)


def test_a_router_counts_the_twin_in_shared_tiers_only_for_no_device_knows_its_names():
    own, exact = block_hashes(range(8), 1, "tolerant"), block_hashes(range(8), 1, "exact")
    mirror = PlacementMirror(2)
    spans = split_segments(exact, 0, 6, 2, 6)
    events = [("seg+", "cpu", "node", span.key, span.start_block, span.marks) for span in spans[:2]]
    events += [("seg+", "redis", "redis", span.key, span.start_block, span.marks) for span in spans]
    events += [("dev+", "a", exact), ("dev+", "b", own[:1])]
    mirror.apply(Deltas(1, 1, 0, [], Part(1, 0, True, events)))

    assert mirror.coverages(own, "ab", exact) == {"a": TierHits(0, 4, 2), "b": TierHits(1, 3, 2)}
    assert mirror.coverages(own, "ab") == {"a": TierHits(0, 0, 0), "b": TierHits(1, 0, 0)}
    assert mirror.coverages(exact, "ab", own)["a"] == TierHits(8, 0, 0)
