import pytest

from kvmanager.eviction.policies import policy_names
from kvmanager.index.locations import REDIS, Location, Tier
from kvmanager.moves.directives import Evict


def freed(directives, location):
    return [key for order in directives if order.source == location for key in order.keys]


# Redis is full


def test_colder_segments_leave_redis_first(brain_with):
    brain = brain_with(redis=2)
    brain.serve("abcd")
    brain.demote_all()
    brain.serve("uvwx")
    demotion = brain.next_demotion()
    assert demotion.keys == brain.keys("uvwx")
    assert demotion.evict == (Evict(REDIS, brain.keys("abcd")[::-1]),)
    assert brain.kept("abcd") == 0


def test_what_is_colder_than_all_at_redis_is_refused_once_and_may_come_back(brain_with):
    brain = brain_with(redis=2)
    for _ in range(3):
        brain.serve("abcd")
    brain.demote_all()
    brain.serve("uv")
    assert brain.next_demotion() is None
    assert brain.next_demotion() is None
    assert brain.counters()["refused_demotions"] == 1
    for _ in range(4):
        brain.serve("uv")
    assert brain.demote_all() == list(brain.keys("uv"))


def test_a_segment_larger_than_redis_is_refused(brain_with):
    brain = brain_with(redis=1)
    brain.manager.commit(0, brain.cpu, brain.offer("ab", nbytes=2).keys, [2])
    brain.serve("uv")
    assert brain.demote_all() == list(brain.keys("uv"))
    assert brain.counters()["refused_demotions"] == 1


def test_of_a_chain_that_does_not_fit_the_head_is_copied(brain_with):
    brain = brain_with(redis=2)
    brain.serve("abcdef")
    assert brain.demote_all() == list(brain.keys("abcd"))
    assert brain.manager.stats(0)["demotion_queue"] == 0


# Leases, ends


def test_what_is_being_copied_is_not_evicted(brain_with):
    brain = brain_with(budget=2, redis=20)
    brain.serve("abcd")
    demotion = brain.next_demotion()
    for _ in range(5):
        brain.serve("uvwx")
    assert brain.stored("abcd") == 4
    brain.finish(demotion)
    brain.serve("uvwx")
    assert brain.stored("uvwx") == 4


def test_a_cleared_segment_stays_until_its_copy_is_finished(tiered):
    tiered.serve("abcd")
    demotion = tiered.next_demotion()
    assert tiered.manager.clear({Tier.CPU}) == ()
    assert freed(tiered.finish(demotion), tiered.cpu) == list(tiered.keys("abcd")[::-1])
    assert tiered.kept("abcd") == 4


def test_what_was_not_stored_is_given_back_and_ordered_away(tiered):
    tiered.serve("abcdef")
    demotion = tiered.next_demotion()
    directives = tiered.finish(demotion, demotion.keys[:1])
    assert directives == (Evict(REDIS, demotion.keys[:0:-1]),)
    assert tiered.kept("abcdef") == 2
    assert redis_bytes(tiered) == (1, 0)
    assert tiered.next_demotion() is None
    tiered.plan("abcdef")
    assert tiered.demote_all() == list(demotion.keys[1:])


def test_redis_holds_what_it_takes_there_and_the_rest_of_the_reservation_is_free_again(brain_with):
    brain = brain_with(redis=10)
    brain.manager.commit(0, brain.cpu, brain.offer("abcd", nbytes=4).keys, [4, 4])
    demotion = brain.next_demotion()
    assert redis_bytes(brain) == (8, 8)
    assert brain.finish(demotion, dict(zip(demotion.keys, (3, 1), strict=True))) == ()
    assert redis_bytes(brain) == (4, 0)
    assert [segment.nbytes for segment in brain.plan("abcd").segments] == [4, 4]
    brain.manager.dropped(0, brain.cpu, brain.keys("abcd"))
    assert [segment.nbytes for segment in brain.plan("abcd").segments] == [3, 1]


def test_what_takes_more_than_was_reserved_is_evicted_with_what_continues_it(tiered):
    tiered.serve("abcd")
    demotion = tiered.next_demotion()
    directives = tiered.finish(demotion, dict(zip(demotion.keys, (2, 1), strict=True)))
    assert freed(directives, REDIS) == list(demotion.keys[::-1])
    assert redis_bytes(tiered) == (0, 0)


def redis_bytes(brain):
    (found,) = [store for store in brain.manager.stats(brain.now)["locations"] if store["tier"] == "redis"]
    return found["bytes"], found["reserved_bytes"]


def test_what_was_stored_without_its_parent_is_evicted(tiered):
    tiered.serve("abcdef")
    demotion = tiered.next_demotion()
    directives = tiered.finish(demotion, demotion.keys[1:])
    assert freed(directives, REDIS) == list(demotion.keys[::-1])
    assert redis_bytes(tiered) == (0, 0)


def test_a_lost_demotion_leaves_nothing_behind(brain_with):
    brain = brain_with(budget=2, redis=20, save_s=5.0)
    brain.serve("abcd")
    demotion = brain.next_demotion()
    brain.now = 5.0
    assert brain.manager.expire(brain.now) == (Evict(REDIS, demotion.keys[::-1]),)
    assert brain.counters()["expired_demotions"] == 1
    assert brain.manager.stats(brain.now)["demotions"] == 0
    assert redis_bytes(brain) == (0, 0)
    brain.serve("uvwx")
    assert brain.stored("uvwx") == 4


def test_children_are_ordered_away_before_parents_across_lost_demotions(tiered):
    tiered.serve("abcd")
    first, second = tiered.next_demotion(most_bytes=1), tiered.next_demotion(most_bytes=1)
    tiered.now = 31.0
    assert tiered.manager.expire(tiered.now) == (Evict(REDIS, second.keys + first.keys),)


def test_what_a_lost_demotion_wrote_too_late_is_ordered_away(tiered):
    tiered.serve("abcd")
    demotion = tiered.next_demotion()
    tiered.now = 31.0
    tiered.manager.expire(tiered.now)
    assert tiered.finish(demotion) == (Evict(REDIS, demotion.keys[::-1]),)
    assert tiered.counters()["stray_segments"] == 2
    assert tiered.kept("abcd") == 0


def test_a_finish_that_is_itself_too_late_orders_each_segment_away_once(tiered):
    tiered.serve("abcd")
    demotion = tiered.next_demotion()
    tiered.now = 31.0
    assert tiered.finish(demotion) == (Evict(REDIS, demotion.keys[::-1]),)


def test_what_a_later_demotion_is_writing_is_not_ordered_away_by_a_late_report(tiered):
    tiered.serve("abcd")
    late = tiered.next_demotion()
    tiered.now = 31.0
    tiered.manager.expire(tiered.now)
    tiered.plan("abcd")
    again = tiered.next_demotion()
    assert again.keys == late.keys
    assert tiered.finish(late) == ()
    assert tiered.finish(again) == ()
    assert tiered.finish(again) == ()
    assert tiered.kept("abcd") == 4


def test_an_eviction_that_is_due_at_redis_comes_before_the_segment_is_written_again(tiered):
    tiered.manager.adopt(0, tiered.redis, tiered.spans("ab"), [1])
    plan = tiered.plan("ab")
    tiered.commit(tiered.manager.prefetch(0, "replica", tiered.cpu, tiered.keys("ab")).keys)
    tiered.manager.clear({Tier.REDIS})
    tiered.manager.release(plan.lease_id)
    tiered.plan("ab")
    demotion = tiered.next_demotion()
    assert demotion.evict == (Evict(REDIS, tiered.keys("ab")),)
    assert tiered.manager.expire(0) == ()


def test_an_eviction_that_is_due_is_not_lost_when_there_is_nothing_to_copy(tiered):
    tiered.serve("ab")
    tiered.demote_all()
    plan = tiered.plan("ab")
    tiered.manager.clear({Tier.CPU})
    tiered.manager.release(plan.lease_id)
    assert tiered.next_demotion() is None
    assert freed(tiered.manager.expire(0), tiered.cpu) == list(tiered.keys("ab"))


def test_a_segment_whose_eviction_from_redis_waits_for_a_lease_is_refused_for_now(tiered):
    tiered.serve("ab")
    tiered.demote_all()
    tiered.manager.dropped(0, tiered.cpu, tiered.keys("ab"))
    plan = tiered.plan("ab")
    tiered.manager.clear({Tier.REDIS})
    tiered.serve("abcd")
    assert tiered.next_demotion() is None
    tiered.manager.release(plan.lease_id)
    tiered.plan("abcd")
    assert tiered.demote_all() == list(tiered.keys("abcd"))


@pytest.mark.parametrize("policy", policy_names())
def test_the_coldest_of_two_tiers_do_not_push_each_other_out_of_redis_without_end(brain_with, policy):
    brain = brain_with(redis=1, redis_min_uses=100, cpu_high_water=0.05, eviction_policy=policy)
    other = Location(Tier.CPU, "other")
    brain.manager.set_budget(other, 10)
    brain.serve("ab")
    brain.serve("cd", location=other)
    assert len(brain.demote_all()) <= 2


def test_nothing_is_committed_at_a_redis_that_was_lost_meanwhile(tiered):
    tiered.serve("abcd")
    demotion = tiered.next_demotion()
    tiered.manager.forget_holder(tiered.redis)
    assert tiered.finish(demotion) == ()
    assert tiered.kept("abcd") == 0
    assert redis_bytes(tiered) == (0, 0)
    assert tiered.manager.stats(0)["demotions"] == 0
    assert len(tiered.manager.clear({Tier.CPU})[0].keys) == 2, "a lease was left behind"


def test_a_demotion_whose_cpu_tier_is_lost_may_still_be_finished(tiered):
    tiered.serve("abcd")
    demotion = tiered.next_demotion()
    tiered.manager.forget_holder(tiered.cpu)
    assert tiered.finish(demotion) == ()
    assert tiered.kept("abcd") == 4
