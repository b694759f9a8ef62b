"""Orders of one prompt of a model with states: these are its own as its tokens are, and no other prompt's."""

import pytest
from stored_states import landing, plan, store

from kvmanager.index.locations import REDIS, Tier
from kvmanager.moves.prompt_orders import PinnedError
from kvmanager.segments.keys import SegmentKey, state_name


def states(brain, text):
    """The name of the states behind a text."""
    return SegmentKey(state_name(brain.hashes(text)[-1]))


def evict(brain, text):
    """Evict a prompt; return how many segments it took, and what the tiers are ordered to free."""
    orders = brain.manager.orders
    amount = orders.evict(Tier.CPU, orders.path_of(brain.hashes(text)))
    while brain.manager.sweeping:
        brain.manager.sweep(brain.now)
    return amount.segments, brain.evicted()


def test_states_inside_a_prompt_are_no_other_prompt(brain):
    store(brain, "abcdef", 2, 3, 4, 6)
    own = brain.manager.orders.own_from
    assert own(brain.hashes("abcdef")) == 0
    brain.serve("abcdxy")
    assert own(brain.hashes("abcdef")) == 4
    assert own(brain.hashes("abcd")) == 0, "with what follows on it"


def test_a_prompt_goes_with_all_its_states_and_leaves_those_that_another_one_is_loaded_with(brain):
    store(brain, "abcdef", 2, 4, 6)
    store(brain, "abxyuv", 6)
    would = brain.manager.orders.would_evict(Tier.CPU, brain.manager.orders.path_of(brain.hashes("abcdef")))
    assert would.segments == 4
    count, freed = evict(brain, "abcdef")
    assert (count, set(freed)) == (4, {*brain.keys("abcdef")[1:], states(brain, "abcd"), states(brain, "abcdef")})
    made = plan(brain, "abxyuvw")
    assert landing(made) == (6, 6, 0)
    brain.manager.release(made.lease_id)
    count, freed = evict(brain, "abxyuv")
    assert (count, set(freed)) == (5, {*brain.keys("abxyuv"), states(brain, "ab"), states(brain, "abxyuv")})
    assert brain.manager.stats(brain.now)["locations"][0]["segments"] == 0


def test_what_another_prompt_stores_meanwhile_behind_a_shared_beginning_keeps_it(brain):
    store(brain, "abcdef", 2, 4)
    offer = brain.offer("abcdxy", start=4)
    assert offer.keys
    assert evict(brain, "abcdef")[0] == 1
    brain.commit(offer.keys)
    assert brain.stored("abcdxy") == 6


def test_states_that_are_pinned_keep_what_they_follow_on(brain_with):
    brain = brain_with(budget=100, pin_budget_bytes=10)
    store(brain, "abcdef", 2, 6)
    brain.manager.pin(brain.now, [states(brain, "ab")], 60.0)
    assert evict(brain, "abcdef")[0] == 3
    assert landing(plan(brain, "abcd")) == (2, 2, 0)
    with pytest.raises(PinnedError):
        evict(brain, "ab")


def test_a_search_for_other_prompts_looks_at_few_states(brain_with, monkeypatch):
    """One boundary has its states once: so there are no more than a segment has blocks."""
    brain = brain_with(budget=1000)
    store(brain, "abcd", 2)
    for number in range(200):
        brain.serve("ab" + chr(200 + number))
    plan(brain, "abz")
    looked_at = []
    node = brain.manager._trie.nodes[brain.keys("ab")[-1]]
    children = type(node).children
    monkeypatch.setattr(
        type(node), "children", lambda self: (looked_at.append(each) or each for each in children(self))
    )
    assert brain.manager.orders.own_from(brain.hashes("abcd")) == 2
    assert evict(brain, "abcd")[0] == 1
    assert len(looked_at) < 12


@pytest.mark.parametrize(("boundaries", "copied"), [((2, 4), (4, 2)), ((2, 3, 4), (4, 3)), ((2, 3), (3,)), ((), ())])
def test_what_is_copied_to_redis_can_be_loaded_from_there(brain_with, boundaries, copied):
    """The last states; and, where these are behind the last token perhaps, the ones before them."""
    brain = brain_with(redis=20, redis_min_uses=9)
    store(brain, "abcd", *boundaries)
    orders, hashes = brain.manager.orders, brain.hashes("abcd")
    assert (orders.compress(hashes).waiting, orders.compressed(hashes).segments) == (2 + len(copied),) * 2
    brain.demote_all()
    done = orders.compressed(hashes)
    assert (done.stored, done.waiting) == (2 + len(copied), 0)
    brain.manager.clear({Tier.CPU})
    found = [landing(plan(brain, text))[1] for text in ("abcdx", "abcd")]
    last = [max((at for at in copied if at < end), default=0) for end in (5, 4)]
    assert found == last


def test_of_a_model_without_states_no_block_is_hashed(tiered, monkeypatch):
    tiered.serve("abcd")
    monkeypatch.setattr("kvmanager.moves.chain_search.state_name", None)
    assert tiered.manager.orders.compress(tiered.hashes("abcd")).waiting == 2


def test_states_that_are_not_stored_any_more_are_not_waited_for(brain_with):
    brain = brain_with(redis=20, redis_min_uses=9)
    store(brain, "abcdef", 2, 5)
    brain.manager.dropped(brain.now, brain.cpu, [states(brain, "abcde")])
    hashes = brain.hashes("abcdef")
    assert brain.manager.orders.compress(hashes).waiting == 4
    brain.demote_all()
    done = brain.manager.orders.compressed(hashes)
    assert (done.segments, done.stored, done.waiting) == (4, 4, 0)
    assert brain.manager._trie.nodes[states(brain, "ab")].copy_at(brain.manager._catalog.stores[REDIS]).resident


@pytest.fixture(autouse=True)
def _room(brain):
    brain.manager.set_budget(brain.cpu, 100)
