"""What people order of one prompt: what goes with an eviction, what stays, and what is copied to Redis at once."""

import pytest

from kvmanager.index.locations import REDIS, Tier
from kvmanager.moves import prompt_orders
from kvmanager.moves.prompt_orders import NoRedisError, PinnedError


def path(brain, text):
    return brain.manager.orders.path_of(brain.hashes(text))


def evict(brain, text, tier=Tier.CPU):
    """Evict a prompt and return what it took and what the tiers are ordered to free."""
    amount = brain.manager.orders.evict(tier, path(brain, text))
    while brain.manager.sweeping:
        brain.manager.sweep(brain.now)
    return amount, brain.evicted()


def test_what_only_this_prompt_needs_goes_with_all_that_follows_on_it(brain):
    for text in ("abcdef", "abcdxy", "uv"):
        brain.serve(text)
    would = brain.manager.orders.would_evict(Tier.CPU, path(brain, "abcdef"))
    assert (would.segments, would.nbytes, would.complete) == (1, 1, True)
    assert brain.stored("abcdef") == 6, "asking changes nothing"
    amount, freed = evict(brain, "abcdef")
    assert (amount, freed) == (would, [brain.keys("abcdef")[-1]])
    assert (brain.stored("abcdef"), brain.stored("abcdxy"), brain.stored("uv")) == (4, 6, 2)
    amount, freed = evict(brain, "abcd")
    assert (amount.segments, freed) == (3, list(brain.keys("abcdxy")[::-1]))
    assert brain.stored("uv") == 2


def test_a_prompt_that_nobody_shares_goes_as_a_whole_and_one_that_is_not_stored_takes_nothing(brain):
    brain.serve("abcdef")
    assert evict(brain, "xyxy") == (prompt_orders.Amount(), [])
    amount, freed = evict(brain, "abcdef")
    assert (amount.segments, freed) == (3, list(brain.keys("abcdef")[::-1]))
    assert brain.stored("abcdef") == 0


def test_a_segment_that_reaches_beyond_the_prompt_is_not_the_prompts(brain):
    brain.serve("abcd")
    assert evict(brain, "abc")[1] == list(brain.keys("abcd")[::-1]), "the first two blocks are: all that follows goes"
    brain.serve("abcd")
    assert evict(brain, "a") == (prompt_orders.Amount(), [])
    assert brain.stored("abcd") == 4


def test_each_tier_is_asked_by_itself(tiered):
    tiered.serve("abcd")
    tiered.demote_all()
    amount, freed = evict(tiered, "abcd", Tier.REDIS)
    assert (amount.segments, len(freed)) == (2, 2)
    assert (tiered.stored("abcd"), tiered.kept("abcd")) == (4, 0)


def test_what_a_pin_keeps_is_refused_and_what_is_leased_goes_when_the_lease_ends(brain_with):
    brain = brain_with(pin_budget_bytes=10)
    for text in ("abcdef", "abcdxy"):
        brain.serve(text)
    brain.pin("abcdxy")
    for text in ("abcdxy", "abcd", "ab"):
        with pytest.raises(PinnedError):
            brain.manager.orders.evict(Tier.CPU, path(brain, text))
        with pytest.raises(PinnedError):
            brain.manager.orders.would_evict(Tier.CPU, path(brain, text))
    assert brain.stored("abcdxy") == 6
    plan = brain.plan("abcdef")
    amount, freed = evict(brain, "abcdef")
    assert (amount.segments, freed) == (1, [])
    assert brain.stored("abcdef") == 4, "no plan has it any more"
    brain.manager.release(plan.lease_id)
    assert brain.evicted() == [brain.keys("abcdef")[-1]]


def test_what_would_go_is_counted_up_to_a_bound(brain, monkeypatch):
    monkeypatch.setattr(prompt_orders, "MOST_COUNTED", 2)
    brain.serve("abcdefgh")
    would = brain.manager.orders.would_evict(Tier.CPU, path(brain, "abcdefgh"))
    assert (would.segments, would.complete) == (2, False)


def test_a_prompts_own_part_begins_where_others_part_from_it(brain):
    for text in ("abcdef", "abcdxy"):
        brain.serve(text)
    own = brain.manager.orders.own_from
    assert [own(brain.hashes(text)) for text in ("abcdef", "abcd", "uv", "")] == [4, 0, 0, 0]


def test_what_is_ordered_goes_to_redis_before_what_has_earned_it(brain_with):
    brain = brain_with(redis=20, redis_min_uses=2)
    brain.serve("abcd")
    for _ in range(3):
        brain.serve("uv")
    orders = brain.manager.orders
    before = orders.compress(brain.hashes("abcd"))
    assert (before.segments, before.stored, before.waiting) == (2, 0, 2)
    demotion = brain.next_demotion()
    assert demotion.keys == brain.keys("abcd")
    assert orders.compressed(brain.hashes("abcd")).waiting == 2
    brain.finish(demotion, dict.fromkeys(demotion.keys, 0.5))
    after = orders.compressed(brain.hashes("abcd"))
    assert (after.stored, after.waiting, after.raw_bytes, after.coded_bytes) == (2, 0, 2, 1.0)
    assert brain.stored("abcd") == 4, "the copies in the CPU tier stay"
    assert brain.next_demotion().keys == brain.keys("uv")


def test_what_redis_refuses_waits_no_more(brain_with):
    brain = brain_with(redis=1, redis_min_uses=2)
    for _ in range(5):
        brain.serve("uv")
    brain.demote_all()
    brain.serve("ab")
    assert brain.manager.orders.compress(brain.hashes("ab")).waiting == 1
    assert brain.next_demotion() is None, "what is there is hotter"
    state = brain.manager.orders.compressed(brain.hashes("ab"))
    assert (state.segments, state.stored, state.waiting) == (1, 0, 0)


def test_orders_are_bounded_and_refused_without_redis(brain, tiered, monkeypatch):
    brain.serve("ab")
    with pytest.raises(NoRedisError):
        brain.manager.orders.compress(brain.hashes("ab"))
    monkeypatch.setattr("kvmanager.index.demotion_queue.MOST_ORDERED", 1)
    tiered.serve("abcd")
    tiered.demote_all()
    tiered.manager.forget_holder(REDIS)
    tiered.manager.set_budget(REDIS, 20)
    assert tiered.manager.orders.compress(tiered.hashes("abcd")).waiting == 1


def test_a_segment_names_the_path_to_it_for_its_own_tenant(brain):
    brain.commit(brain.offer("abcd", tenant="t").keys)
    orders, key = brain.manager.orders, brain.keys("abcd")[-1]
    assert [node.key for node in orders.path_to(key, "t")] == list(brain.keys("abcd"))
    assert orders.path_to(key, None) == orders.path_to(key, "t")
    assert orders.path_to(key, "another") == orders.path_to(bytes(32), None) == []
    assert orders.evict(Tier.CPU, orders.path_to(brain.keys("abcd")[0], "t")).segments == 2
