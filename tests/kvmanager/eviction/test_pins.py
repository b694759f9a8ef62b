import pytest

from kvmanager.eviction.pins import PinBudgetError, UnknownKeyError
from kvmanager.index.locations import Tier
from kvmanager.moves.plan import PlanReason


@pytest.fixture
def pinnable(brain_with):
    return brain_with(budget=4, pin_budget_bytes=6)


def crowd(brain, prompts=20, location=None):
    """Serve prompts that are hotter than what was used once before."""
    for number in range(prompts):
        brain.serve(chr(1000 + number % 3) * 4, location)


def unpin(brain, text):
    return brain.manager.unpin(brain.now, brain.keys(text)[-1:])


def pinned(brain, text):
    return [segment["pinned"] for segment in brain.manager.lookup(brain.hashes(text))["segments"]]


def test_a_pinned_chain_is_not_evicted_until_it_is_unpinned(pinnable):
    pinnable.serve("abcd")
    pinnable.pin("abcd")
    crowd(pinnable)
    assert pinnable.stored("abcd") == 4
    assert unpin(pinnable, "abcd") == list(pinnable.keys("abcd")[-1:])
    crowd(pinnable)
    assert pinnable.stored("abcd") == 0


def test_a_pin_ends_by_itself(pinnable):
    pinnable.serve("abcd")
    pinnable.pin("abcd", ttl_s=60.0)
    pinnable.now = 59.9
    crowd(pinnable)
    assert (pinnable.stored("abcd"), pinned(pinnable, "abcd")) == (4, [True, True])
    pinnable.now = 60.0
    crowd(pinnable)
    assert pinnable.stored("abcd") == 0
    assert pinnable.manager.stats(0)["pins"] == 0


def test_pins_end_in_the_order_of_their_ends_not_of_their_making(pinnable):
    for text, ttl_s in (("ab", 30.0), ("cd", 10.0), ("ef", 20.0)):
        pinnable.serve(text)
        pinnable.pin(text, ttl_s)
    for now, left in ((10.0, 2), (20.0, 1), (30.0, 0)):
        pinnable.manager.expire(now)
        assert pinnable.manager.stats(now)["pins"] == left


def test_a_pin_made_twice_lasts_for_the_longer_of_both_and_counts_once(pinnable):
    pinnable.serve("ab")
    for ttl_s in (20.0, 40.0, 10.0):
        assert pinnable.pin("ab", ttl_s).pinned_bytes == 1
    pinnable.manager.expire(39.0)
    assert pinned(pinnable, "ab") == [True]
    pinnable.manager.expire(40.0)
    assert pinned(pinnable, "ab") == [False]


def test_what_two_pins_share_is_counted_once_and_stays_until_both_have_ended(pinnable):
    for text in ("abcd", "abxy"):
        pinnable.serve(text)
    assert pinnable.pin("abcd").pinned_bytes == 2
    report = pinnable.pin("abxy")
    assert (report.segments, report.nbytes, report.pinned_bytes, report.budget_bytes) == (2, 2, 3, 6)
    unpin(pinnable, "abcd")
    assert pinnable.manager.stats(0)["pinned_bytes"] == 2
    crowd(pinnable)
    assert (pinnable.stored("abcd"), pinnable.stored("abxy")) == (2, 4)
    unpin(pinnable, "abxy")
    assert pinnable.manager.stats(0)["pinned_bytes"] == 0
    crowd(pinnable)
    assert pinnable.stored("abxy") == 0


def test_a_chain_pinned_by_its_head_alone_may_lose_its_tail(pinnable):
    pinnable.serve("abcd")
    pinnable.pin("ab")
    crowd(pinnable)
    assert pinnable.stored("abcd") == 2


def test_a_pin_keeps_what_is_stored_only_later(pinnable):
    pinnable.offer("abcd")
    pinnable.manager.expire(30.0)
    pinnable.now = 30.0
    assert pinnable.pin("abcd").pinned_bytes == 2
    crowd(pinnable, 3)
    while pinnable.stored("abcd") < 4:
        pinnable.serve("abcd")
    crowd(pinnable, 60)
    assert pinnable.stored("abcd") == 4


def test_a_pin_holds_at_every_location(brain_with):
    brain = brain_with(budget=4, redis=4, pin_budget_bytes=6)
    brain.serve("abcd")
    brain.demote_all()
    brain.pin("abcd")
    for location in (brain.cpu, brain.redis):
        crowd(brain, location=location)
    assert (brain.stored("abcd"), brain.kept("abcd")) == (4, 4)


def test_a_pinned_ghost_is_not_forgotten(brain_with):
    brain = brain_with(budget=0, pin_budget_bytes=6, max_ghosts=4)
    brain.serve("abcd")
    brain.pin("abcd")
    for letter in range(20):
        brain.serve(chr(1000 + letter) * 4)
    assert brain.plan("abcd").reason is PlanReason.EVICTED
    brain.manager.unpin(0, brain.keys("abcd")[-1:])
    assert brain.manager.stats(0)["ghosts"] <= 4
    for letter in range(20):
        brain.serve(chr(1000 + letter) * 4)
    assert brain.manager.stats(0)["ghosts"] == 4
    for letter in range(3000):
        brain.plan("")
        brain.serve(chr(1000 + letter) * 4)
    assert brain.plan("abcd").reason is PlanReason.COLD


def test_a_pinned_chain_that_was_cleared_is_not_forgotten(brain_with):
    brain = brain_with(pin_budget_bytes=6, max_ghosts=4)
    brain.serve("abcd")
    brain.pin("abcd")
    brain.manager.clear({Tier.CPU})
    brain.manager.set_budget(brain.cpu, 0)
    for letter in range(20):
        brain.serve(chr(1000 + letter) * 4)
    assert pinned(brain, "abcd") == [True, True]


def test_a_leased_chain_that_was_unpinned_waits_for_its_lease(pinnable):
    pinnable.serve("abcd")
    plan = pinnable.plan("abcd")
    pinnable.pin("abcd")
    unpin(pinnable, "abcd")
    crowd(pinnable)
    assert pinnable.stored("abcd") == 4
    pinnable.pin("abcd")
    pinnable.manager.release(plan.lease_id)
    crowd(pinnable)
    assert pinnable.stored("abcd") == 4
    unpin(pinnable, "abcd")
    crowd(pinnable)
    assert pinnable.stored("abcd") == 0


def test_what_is_pinned_is_copied_to_redis_but_does_not_leave_the_cpu_tier(brain_with):
    brain = brain_with(budget=4, redis=10, pin_budget_bytes=6, cpu_high_water=0.5)
    brain.serve("abcd")
    brain.serve("uvwx")
    brain.pin("abcd")
    assert set(brain.demote_all()) == {*brain.keys("abcd"), *brain.keys("uvwx")}
    assert {key for order in brain.manager.relieve(0) for key in order.keys} == set(brain.keys("uvwx"))


@pytest.mark.parametrize("loss", ["clear", "dropped", "forget_holder"])
def test_clearing_and_losses_win_over_a_pin_which_keeps_what_comes_back(pinnable, loss):
    pinnable.serve("abcd")
    pinnable.pin("abcd")
    if loss == "clear":
        (order,) = pinnable.manager.clear({Tier.CPU})
        assert set(order.keys) == set(pinnable.keys("abcd"))
    elif loss == "dropped":
        pinnable.manager.dropped(0, pinnable.cpu, pinnable.keys("abcd"))
    else:
        pinnable.manager.forget_holder(pinnable.cpu)
        pinnable.manager.set_budget(pinnable.cpu, 4)
    assert pinnable.stored("abcd") == 0
    assert pinned(pinnable, "abcd") == [True, True]
    assert pinnable.manager.stats(0)["pinned_bytes"] == 2
    pinnable.serve("abcd")
    crowd(pinnable)
    assert pinnable.stored("abcd") == 4


def test_a_pinned_ghost_keeps_its_cut(pinnable):
    """Another cut of the same tokens is refused meanwhile, as it is where the first one is stored."""
    spans = pinnable.spans("ab", prompt=1)
    pinnable.commit(pinnable.manager.offer(0, "replica", pinnable.cpu, spans, [1, 1]).keys)
    pinnable.pin("ab")
    pinnable.manager.clear({Tier.CPU})
    assert pinnable.offer("ab").keys == ()
    assert pinnable.counters()["refused_other_cut"] == 1
    unpin(pinnable, "ab")
    assert pinnable.offer("ab").keys == pinnable.keys("ab")


@pytest.mark.parametrize(
    ("text", "ttl_s", "error", "message"),
    [
        ("abcdef", 60.0, PinBudgetError, r"keep 4 bytes, more than their budget of 2; unpin something or raise kv\."),
        ("zz", 60.0, UnknownKeyError, "no segment [0-9a-f]{64} is known"),
        ("cd", 0.0, ValueError, "more than 0 and up to 86400 seconds, got 0"),
        ("cd", float("nan"), ValueError, "got nan"),
        ("cd", 86401.0, ValueError, "up to 86400 seconds, got 86401"),
    ],
)
def test_a_pin_that_cannot_be_is_refused_and_nothing_changes(brain_with, text, ttl_s, error, message):
    brain = brain_with(pin_budget_bytes=2)
    for known in ("ab", "cd", "abcdef"):
        brain.serve(known)
    brain.pin("ab")
    before = brain.manager.stats(0)
    with pytest.raises(error, match=message):
        brain.manager.pin(0, [*brain.keys("cd"), brain.keys(text)[-1]], ttl_s)
    assert brain.manager.stats(0) == before
    assert pinned(brain, "cd") == [False]


def test_without_a_budget_nothing_is_pinned(brain):
    brain.serve("ab")
    with pytest.raises(PinBudgetError, match="budget of 0"):
        brain.pin("ab")


def test_unpinning_what_is_unknown_changes_nothing(pinnable):
    pinnable.serve("ab")
    pinnable.pin("ab")
    with pytest.raises(UnknownKeyError):
        pinnable.manager.unpin(0, [*pinnable.keys("ab"), *pinnable.keys("zz")])
    assert pinned(pinnable, "ab") == [True]
    pinnable.serve("cd")
    assert unpin(pinnable, "cd") == []


def test_the_stats_tell_of_pins(pinnable):
    stats = pinnable.manager.stats(5.0)
    assert [stats[name] for name in ("pins", "pinned_bytes", "pin_budget_bytes", "oldest_pin_s")] == [0, 0, 6, 0.0]
    pinnable.now = 5.0
    pinnable.serve("abcd")
    assert pinnable.pin("abcd", ttl_s=60.0).until == 65.0
    stats = pinnable.manager.stats(7.0)
    assert [stats[name] for name in ("pins", "pinned_bytes", "pin_budget_bytes", "oldest_pin_s")] == [1, 2, 6, 2.0]
