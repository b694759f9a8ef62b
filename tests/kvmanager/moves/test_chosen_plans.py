"""A plan that loads less than is stored: what it leases, what it counts, and what it says."""

from made_choices import Chosen

from kvmanager.index.locations import Tier
from kvmanager.moves.plan import PlanQuery, PlanReason


def plan(brain, text, count, reason=PlanReason.PARTIAL):
    seen = []

    def choose(segments):
        seen.extend(segments)
        return count, reason

    made = brain.manager.plan(brain.now, "replica", "node", PlanQuery(brain.hashes(text)), Chosen(choose))
    return made, seen


def test_the_choice_sees_all_that_is_stored_and_the_plan_has_its_beginning(brain):
    brain.serve("abcdef")
    made, seen = plan(brain, "abcdefgh", 2)
    assert [segment.key for segment in seen] == list(brain.keys("abcdef"))
    assert made.segments == tuple(seen[:2])
    assert made.reason is PlanReason.PARTIAL


def test_only_what_is_loaded_is_leased(brain):
    brain.serve("abcdef")
    made, _ = plan(brain, "abcdef", 1)
    cleared = [key for order in brain.manager.clear({Tier.CPU}) for key in order.keys]
    assert set(cleared) == set(brain.keys("abcdef")[1:])
    brain.manager.release(made.lease_id)
    assert brain.evicted() == list(brain.keys("abcdef")[:1])


def test_the_end_of_a_short_plan_leaves_the_leases_of_a_longer_one(brain):
    brain.serve("abcdef")
    plan(brain, "abcdef", 3)
    brain.manager.release(plan(brain, "abcdef", 1)[0].lease_id)
    assert [key for order in brain.manager.clear({Tier.CPU}) for key in order.keys] == []


def test_a_plan_that_loads_nothing_has_no_lease(brain):
    brain.serve("abcdef")
    made, _ = plan(brain, "abcdef", 0, PlanReason.RECOMPUTE_FASTER)
    assert (made.lease_id, made.segments, made.reason) == (0, (), PlanReason.RECOMPUTE_FASTER)
    assert brain.manager.stats(brain.now)["leases"] == 0


def test_what_is_not_loaded_counts_as_used_all_the_same(brain):
    brain.serve("abcdef")
    before = dict(brain.plan("abcdef").scores)
    after = dict(plan(brain, "abcdef", 0)[0].scores)
    assert [end for end, _ in plan(brain, "abcdef", 0)[0].scores] == [2, 4, 6]
    assert all(after[end] > before[end] for end in before)


def test_where_nothing_is_stored_nothing_is_chosen(brain):
    made, seen = plan(brain, "abcd", 5)
    assert (made.reason, seen) == (PlanReason.COLD, [])


def test_only_what_is_loaded_counts_as_reused(brain):
    brain.serve("abcdef")
    plan(brain, "abcdef", 2)
    assert brain.counters()["cpu_blocks"] == 4
