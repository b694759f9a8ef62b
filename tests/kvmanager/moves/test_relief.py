import pytest

from kvmanager.moves import demotions


def freed(directives, location):
    return [key for order in directives if order.source == location for key in order.keys]


@pytest.fixture
def pressed(brain_with):
    """A CPU tier of 10 bytes with a mark of 8, whose segments have not earned a copy."""
    return brain_with(redis=20, redis_min_uses=100, cpu_high_water=0.8)


def fill(brain, texts):
    for text in texts:
        brain.serve(text)


def test_below_the_mark_nothing_moves(pressed):
    fill(pressed, ["ab", "cd", "ef", "gh", "ij", "kl", "mn", "op"])
    assert pressed.next_demotion() is None
    pressed.manager.set_budget(pressed.redis, 20)
    assert pressed.manager.relieve(0) == ()


def test_above_the_mark_the_coldest_leaf_is_copied_and_then_leaves(pressed):
    fill(pressed, ["abcd", "cd", "ef", "gh", "ij", "kl", "mn", "op"])
    assert pressed.manager.relieve(0) == ()
    demotion = pressed.next_demotion()
    assert demotion.keys == pressed.keys("abcd")
    assert pressed.next_demotion() is None, "what is under way suffices"
    assert pressed.manager.relieve(0) == ()
    pressed.finish(demotion)
    assert freed(pressed.manager.relieve(0), pressed.cpu) == [pressed.keys("abcd")[1]]
    assert pressed.manager.relieve(0) == ()
    assert (pressed.stored("abcd"), pressed.kept("abcd")) == (2, 4)
    assert pressed.counters()["relieved_segments"] == 1
    plan = pressed.plan("abcd")
    assert [segment.location for segment in plan.segments] == [pressed.cpu, pressed.redis]


def test_relief_stops_at_a_leaf_that_redis_lacks(pressed):
    fill(pressed, ["ab", "cd", "ef", "gh", "ij", "kl", "mn", "op", "qr", "st"])
    demotion = pressed.next_demotion(most_bytes=1)
    pressed.finish(demotion)
    assert freed(pressed.manager.relieve(0), pressed.cpu) == list(pressed.keys("ab"))
    assert pressed.manager.relieve(0) == ()
    assert pressed.manager.stats(0)["locations"][0]["bytes"] == 9


def test_what_redis_has_not_yet_got_is_not_relieved(pressed):
    fill(pressed, ["ab", "cd", "ef", "gh", "ij", "kl", "mn", "op", "qr"])
    offer = pressed.offer("ab", location=pressed.redis)
    assert offer.keys == pressed.keys("ab")
    assert pressed.manager.relieve(0) == ()
    pressed.commit(offer.keys, pressed.redis)
    assert freed(pressed.manager.relieve(0), pressed.cpu) == list(offer.keys)


def test_as_many_leaves_are_copied_as_bring_the_tier_below_its_mark(pressed):
    fill(pressed, ["ab", "cd", "ef", "gh", "ij", "kl", "mn", "op", "qr", "st"])
    assert pressed.demote_all() == [*pressed.keys("ab"), *pressed.keys("cd")]
    assert len(freed(pressed.manager.relieve(0), pressed.cpu)) == 2


def test_a_tier_that_was_full_when_redis_came_gives_up_a_bounded_number_in_a_call(brain_with, monkeypatch):
    monkeypatch.setattr(demotions, "MOST_RELIEVED", 3)
    brain = brain_with(redis=20, cpu_high_water=0.4)
    texts = [2 * letter for letter in "abcdefghij"]
    fill(brain, texts)
    for text in texts:
        brain.manager.adopt(0.0, brain.redis, brain.spans(text), [1])
    relieved = []
    while directives := brain.manager.relieve(0):
        relieved.append(len(freed(directives, brain.cpu)))
    assert relieved == [3, 3]
    assert brain.manager.stats(0)["locations"][0]["segments"] == 4, "all that is above the mark, in the end"


def test_a_leaf_that_is_leased_is_not_relieved(pressed):
    fill(pressed, ["ab", "cd", "ef", "gh", "ij", "kl", "mn", "op", "qr"])
    pressed.demote_all()
    plan = pressed.plan("ab")
    assert pressed.manager.relieve(0) == ()
    pressed.manager.release(plan.lease_id)


def test_a_coldest_leaf_that_redis_refuses_is_counted_once(brain_with):
    brain = brain_with(redis=1, redis_min_uses=4, cpu_high_water=0.5)
    for _ in range(4):
        brain.serve("hh")
    brain.demote_all()
    fill(brain, ["ab", "cd", "ef", "gh", "ij"])
    for _ in range(5):
        assert brain.next_demotion() is None
    assert brain.counters()["refused_demotions"] == 1


def test_neither_reason_starves_the_other(brain_with):
    brain = brain_with(redis=20, redis_min_uses=2, cpu_high_water=0.1)
    fill(brain, ["ab", "cd", "ef", "gh", "uv", "wx", "yz", "uv", "wx", "yz"])
    served = [brain.next_demotion(most_bytes=1).keys[0] for _ in range(4)]
    cold, earned = set(brain.keys("ab") + brain.keys("cd")), set(brain.keys("uv") + brain.keys("wx"))
    assert set(served) == cold | earned
