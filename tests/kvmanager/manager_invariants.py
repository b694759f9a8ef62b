"""What holds of a `ManagerWorld` at any time, and what its manager tells whoever asks."""

import naive_reach
import naive_states
import pytest
from manager_world import LOCATIONS
from naive_manager import hashes_of

from kvmanager.index.deltas import NOTHING_SEEN
from kvmanager.index.locations import REDIS, Location, Tier
from kvmanager.segments.spans import NodeKind


def lookup_tells_the_truth(world, prompt, tenant):
    hashes = hashes_of(prompt, tenant)
    report = world.manager.lookup(hashes, len(hashes) - 1)
    marks = {mark["end"]: set(mark["tiers"]) for segment in report["segments"] for mark in segment["landings"]}
    assert report["landing"] == naive_states.last_landing(world.naive, hashes, world.naive.stored_anywhere())
    for tier in (Tier.CPU, Tier.REDIS):
        held = set().union(*(world.naive.resident(place) for place in LOCATIONS if place.tier is tier))
        assert report[tier.value] == naive_reach.reach(world.naive, hashes, held)
        landings = naive_states.landings(world.naive, hashes, held)
        assert landings == sorted(end for end, tiers in marks.items() if tier.value in tiers)
    for replica, leading in report["device"].items():
        held = [key in world.naive.devices.get(replica, ()) for key in hashes]
        assert leading == (held.index(False) if False in held else len(held))
    pinned = world.naive.pinned()
    naive_reach.check_path(world.naive, hashes, [(bytes.fromhex(one["key"]), one["end"]) for one in report["segments"]])
    for segment in report["segments"]:
        key = bytes.fromhex(segment["key"])
        assert segment["uses"] == pytest.approx(world.naive.decayed(key))
        assert segment["pinned"] == (key in pinned)


def check(world):
    """All of them. What policies were told is the only thing that is not seen from outside."""
    resident_is_what_was_committed_and_nothing_is_orphaned(world)
    exactly_the_free_leaves_may_be_evicted(world)
    budgets_and_counts_hold(world)
    the_tree_that_people_see_is_all_of_it(world)


def resident_is_what_was_committed_and_nothing_is_orphaned(world):
    part = world.manager.deltas_since(NOTHING_SEEN, 1).part
    assert part.last
    told = {(Tier(event[1]), event[2], event[3]) for event in part.events if len(event) == 6}
    for location in LOCATIONS:
        resident = {key for tier, holder, key in told if (tier, holder) == location}
        assert resident == world.naive.resident(location)
        assert resident <= set(world.inventory[location]), "published before its bytes were there"
        assert all(world.naive.known[key].parent in {None, *resident} for key in resident), "an orphan"


def exactly_the_free_leaves_may_be_evicted(world):
    for location in LOCATIONS:
        store, held = world.manager._catalog.stores[location], world.naive.copies[location]
        shares = {"": store.common, **store.tenants}
        assert shares.keys() == {"", *world.naive.quotas.get(location.tier, {})}
        for share, partition in shares.items():
            assert {copy.node.key for copy in partition.policy.exposed} == world.naive.leaves(location, share)
            here = {key for key in held if world.naive.share(location, key) == share}
            assert {copy.node.key for copy in partition.policy.here} == here


def budgets_and_counts_hold(world):
    stats, naive = world.manager.stats(world.now), world.naive
    assert not naive.evicted, "evicted, but not told"
    for found in stats["locations"]:
        location = Location(Tier(found["tier"]), found["holder"])
        promised = [copy.nbytes for copy in naive.copies[location].values() if copy.state == "reserved"]
        assert found["bytes"] == naive.used_bytes(location) <= world.budgets[location]
        assert found["reserved_bytes"] == sum(promised)
        resident = naive.resident(location)
        states = [key for key in resident if naive.known[key].kind is NodeKind.STATE]
        assert (found["segments"], found["states"]) == (len(resident), len(states))
        quotas = naive.quotas.get(location.tier, {})
        assert found["tenants"] == {
            tenant: {
                "bytes": naive.used_of(location, tenant),
                "quota_bytes": quota,
                "budget_bytes": naive.budget_of(location, tenant),
            }
            for tenant, quota in quotas.items()
        }
        waiting = {key for place, key in naive.due if place == location}
        if location == REDIS:  # what was reserved is cleared before its demotion has ended
            waiting |= {copy.key for *_, targets in naive.demotions.values() for copy in targets}
        really_held = sum(size for key, (_, size) in world.inventory[location].items() if key not in waiting)
        assert really_held <= world.budgets[location]
    stored = {key for held in naive.copies.values() for key in held}
    assert stats["nodes"] == len(naive.known)
    assert stats["ghosts"] == len(naive.known.keys() - stored)
    assert stats["leases"] == len(naive.leases)
    assert stats["demotions"] == len(naive.demotions)
    assert (stats["pins"], stats["pinned_bytes"]) == (len(naive.pins), naive.pinned_bytes())
    assert stats["pinned_bytes"] <= world.pin_budget
    assert world.budgets[REDIS] or stats["demotion_queue"] == 0


def end(world):
    """Once all has ended, nothing is leased, pinned, reserved, or held without the index knowing."""
    world.time_passes(1000.0)
    check(world)
    stats = world.manager.stats(world.now)
    assert [stats[name] for name in ("leases", "reservations", "demotions", "pins", "pinned_bytes")] == [0] * 5
    for found in stats["locations"]:
        location = Location(Tier(found["tier"]), found["holder"])
        assert found["reserved_bytes"] == 0
        assert world.inventory[location].keys() == world.naive.copies[location].keys()
        shares = ("", *world.naive.quotas.get(location.tier, {}))
        for share in shares:
            assert world.naive.used_of(location, share) <= world.naive.budget_of(location, share)


def the_tree_that_people_see_is_all_of_it(world):
    """With room for all nodes each is in the tree of its tenant once, behind its parent, and nothing is hidden.

    But for states: they are marks of what they follow on while they are somewhere.
    """
    stored, views = world.naive.stored_anywhere(), world.manager.views
    known = {key: span for key, span in world.naive.known.items() if span.kind is not NodeKind.STATE}
    states = {key: span for key, span in world.naive.known.items() if span.kind is NodeKind.STATE}
    tree = views.tree(None, None, 16, 2000)
    keys = [one.node.key for one in tree.shown]
    deep = any(one.level == 16 for one in tree.shown)
    assert len(keys) == len(set(keys))
    assert deep or (set(keys) == known.keys() and not tree.hidden_roots)
    below = dict.fromkeys(known, 0)
    for span in known.values():
        while span.parent is not None:
            below[span.parent] += 1
            span = known[span.parent]
    for one in tree.shown:
        assert one.complete
        assert one.segments_below == below[one.node.key]
        assert one.node.num_children == sum(span.parent == one.node.key for span in world.naive.known.values())
        marked = {key for key, span in states.items() if span.parent == one.node.key}
        assert stored & marked <= {state.key for state in one.states} <= marked
        assert deep or not one.hidden
    for tenant in ("", "tenant1", "tenant2"):
        own = {one.node.key for one in views.tree(tenant, None, 16, 2000).shown}
        assert own == {key for key in keys if known[key].tenant == tenant}
