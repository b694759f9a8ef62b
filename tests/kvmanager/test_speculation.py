"""Speculation: whose KV is wanted on which device, what is ordered for it, and what the next turn says of it."""

import random
from collections import defaultdict

import pytest

from kvmanager.conversations import Conversations
from kvmanager.directives import DirectiveKind, Outcome
from kvmanager.keys import BlockHash
from kvmanager.speculation import OVERLOADED_REFUSALS, UNPIN_AFTER_S, Speculator
from kvmanager.speculation_orders import SpeculationSetting

PROMOTE, PIN, UNPIN = DirectiveKind.PROMOTE, DirectiveKind.PIN, DirectiveKind.UNPIN
EVERY_TURN = SpeculationSetting(least_probability=0.0, advantage=1.0)


def blocks(name, count, start=0):
    """Hashes of a conversation's blocks."""
    return [BlockHash(f"{name}/{number}".encode().ljust(32, b".")) for number in range(start, start + count)]


class World:
    """A speculator and the devices it speaks of. `now` moves only by `wait`."""

    def __init__(self, setting=EVERY_TURN, budgets=None):
        self.now = 0.0
        self.devices = defaultdict(set)
        self.brain = Speculator(setting, self.held)
        self.brain.block_bytes = 1000
        for replica, budget in (budgets or {"a": 100}).items():
            self.brain.set_budget(replica, budget)

    def held(self, replica, hashes):
        device = self.devices[replica]
        return next((n for n, block in enumerate(hashes) if block not in device), len(hashes))

    def answer(self, hashes, replica="a", prompt_blocks=None, stays=True):
        """An answer ends at a replica; its KV stays on the device, or is evicted at once."""
        self.brain.answered(self.now, replica, hashes, len(hashes) if prompt_blocks is None else prompt_blocks)
        if stays:
            self.devices[replica].update(hashes)

    def arrive(self, hashes, replica="a"):
        return self.brain.arrived(self.now, replica, hashes)

    def wait(self, seconds=1.0):
        self.now += seconds
        return self.brain.orders(self.now)

    def obey(self, orders, outcome=Outcome.DONE):
        """Carry orders out, or fail to."""
        for order in orders:
            if order.kind is PROMOTE and outcome == Outcome.DONE:
                self.devices[order.replica].update(order.hashes)
            if order.order_id:
                self.brain.ended(self.now, order.order_id, outcome)

    def count(self, name):
        return self.brain.stats()[name]


@pytest.fixture
def world():
    return World()


def summary(orders):
    return [(order.kind, order.replica, order.hashes) for order in orders]


def test_kv_that_left_the_device_is_promoted_and_then_pinned(world):
    talk = blocks("talk", 4)
    world.answer(talk, stays=False)
    orders = world.wait()
    assert summary(orders) == [(PROMOTE, "a", talk)]
    world.obey(orders)
    assert summary(world.wait()) == [(PIN, "a", talk)]


def test_kv_that_is_on_the_device_is_pinned_where_it_is(world):
    talk = blocks("talk", 4)
    world.answer(talk)
    assert summary(world.wait()) == [(PIN, "a", talk)]


def test_an_order_under_way_is_not_given_twice_and_one_that_failed_again_after_a_while(world):
    world.answer(blocks("talk", 4), stays=False)
    orders = world.wait()
    assert world.wait() == []
    world.obey(orders, Outcome.FAILED)
    assert world.wait() == []
    assert [order.kind for order in world.wait(EVERY_TURN.retry_s)] == [PROMOTE]
    assert world.count("refused") == 1


def test_what_was_promoted_and_did_not_stay_is_wasted_and_promoted_again_after_a_while(world):
    talk = blocks("talk", 4)
    world.answer(talk, stays=False)
    world.obey(world.wait())
    world.devices["a"].clear()
    assert world.wait() == []
    assert (world.count("wasted"), world.count("wasted_blocks")) == (1, 4)
    assert summary(world.wait(EVERY_TURN.retry_s)) == [(PROMOTE, "a", talk)]


def test_the_next_turn_finds_what_was_promoted_and_the_promotion_counts_as_used(world):
    talk = blocks("talk", 4)
    world.answer(talk, stays=False)
    world.obey(world.wait())
    assert world.arrive(talk + blocks("question", 2)) is True
    stats = world.brain.stats()
    assert (stats["found"], stats["used"], stats["wasted"], stats["missed"]) == (1, 1, 0, 0)


def test_a_next_turn_that_comes_before_anything_was_done_is_missed(world):
    talk = blocks("talk", 4)
    world.answer(talk, stays=False)
    assert world.arrive(talk) is False
    assert (world.count("next_turns"), world.count("missed"), world.count("found")) == (1, 1, 0)


def test_a_next_turn_at_another_replica_wastes_the_promotion():
    world = World(budgets={"a": 100, "b": 100})
    talk = blocks("talk", 4)
    world.answer(talk, stays=False)
    world.obey(world.wait())
    assert world.arrive(talk, replica="b") is False
    assert (world.count("used"), world.count("wasted"), world.count("wasted_blocks")) == (0, 1, 4)


def test_a_next_turn_that_finds_its_kv_elsewhere_has_not_used_the_promotion():
    world = World(budgets={"a": 100, "b": 100})
    talk = blocks("talk", 4)
    world.answer(talk, stays=False)
    world.obey(world.wait())
    world.devices["b"].update(talk)
    assert world.arrive(talk, replica="b") is True
    assert (world.count("used"), world.count("wasted")) == (0, 1)


def test_conversations_that_never_come_back_teach_that_none_will():
    world = World()
    before = world.brain.think_times.probability_of_next(1, 0.0)
    for number in range(300):
        world.answer(blocks(number, 1))
        world.wait(60.0)
    assert world.brain.think_times.probability_of_next(1, 0.0) < before / 4


def test_pins_of_a_replica_that_began_anew_are_not_ended_by_those_before(world):
    trunk = blocks("system prompt", 2)
    one, two = trunk + blocks("one", 2), trunk + blocks("two", 2)
    world.answer(one)
    world.obey(world.wait())
    world.arrive(one)
    world.brain.forget_replica(world.now, "a")
    world.brain.set_budget("a", 100)
    world.answer(two)
    assert summary(world.wait(0.1)) == [(PIN, "a", two)]
    assert world.wait(UNPIN_AFTER_S) == []


def test_kv_half_of_which_is_on_the_device_is_not_found(world):
    talk = blocks("talk", 4)
    world.answer(talk)
    world.devices["a"].discard(talk[3])
    assert world.arrive(talk) is False


def test_a_promotion_that_ends_after_its_turn_came_is_forgotten(world):
    talk = blocks("talk", 4)
    world.answer(talk, stays=False)
    orders = world.wait()
    world.arrive(talk)
    world.obey(orders)
    assert (world.count("used"), world.count("promoted"), world.count("under_way")) == (0, 0, 0)


def test_a_prompt_that_continues_nothing_known_is_no_next_turn(world):
    world.answer(blocks("talk", 4))
    assert world.arrive(blocks("other", 9)) is None
    assert world.arrive([]) is None
    assert world.count("next_turns") == 0


def test_a_next_turn_whose_answer_reads_otherwise_is_found_by_the_prompt(world):
    prompt, answer = blocks("talk", 3), blocks("answer", 2)
    world.answer(prompt + answer, prompt_blocks=3)
    world.devices["a"].difference_update(answer)
    assert world.arrive(prompt + blocks("rewritten answer", 4)) is True


def test_the_longest_of_two_conversations_that_a_prompt_continues_is_meant(world):
    trunk = blocks("talk", 3)
    world.answer(trunk)
    world.answer(trunk + blocks("branch", 3), stays=False)
    assert world.arrive(trunk + blocks("branch", 5)) is False
    assert world.arrive(trunk + blocks("other branch", 5)) is True


def test_turns_are_numbered_along_a_conversation(world):
    talk = blocks("talk", 2)
    for turn in (1, 2, 3):
        world.answer(talk)
        (conversation,) = world.brain._conversations
        assert conversation.turn == turn
        talk = [*talk, *blocks("talk", 2, start=len(talk))]
        world.now += 1
        world.arrive(talk)


def test_the_budget_goes_to_those_worth_most_per_block():
    # Loading costs `load_latency_s` in any case, so at equal chances a short conversation is worth more per block.
    world = World(budgets={"a": 10})
    for name, size in (("long", 9), ("short", 2), ("middle", 5)):
        world.answer(blocks(name, size), stays=False)
    ordered = [len(order.hashes) for order in world.wait()]
    assert ordered == [2, 5]
    assert world.count("wanted_blocks") == {"a": 7}


def test_a_conversation_larger_than_the_budget_is_left_alone_and_hides_no_other():
    world = World(budgets={"a": 5})
    world.answer(blocks("huge", 50), stays=False)
    world.answer(blocks("small", 4), stays=False)
    assert summary(world.wait()) == [(PROMOTE, "a", blocks("small", 4))]


def test_a_budget_that_shrinks_drops_those_worth_least():
    world = World(budgets={"a": 10})
    for name, size in (("short", 3), ("middle", 6)):
        world.answer(blocks(name, size))
    world.obey(world.wait())
    world.brain.set_budget("a", 5)
    assert summary(world.wait()) == [(UNPIN, "a", blocks("middle", 6))]
    assert world.count("wanted_blocks") == {"a": 3}


def test_without_a_budget_or_a_block_size_nothing_is_ordered():
    world = World(budgets={"a": 0})
    world.answer(blocks("talk", 1), stays=False)
    world.answer(blocks("talk", 1), replica="unheard of", stays=False)
    assert world.wait(100.0) == []
    world.brain.set_budget("a", 10)
    world.brain.block_bytes = 0
    assert world.wait(100.0) == []


def test_promotions_keep_to_their_share_of_the_link():
    setting = SpeculationSetting(least_probability=0.0, move_bytes_per_s=2000.0, order_s=2.0)  # two blocks a second
    world = World(setting, budgets={"a": 1000})
    world.wait(1000.0)  # what is not used is not saved up for ever
    for number in range(200):
        world.answer(blocks(f"talk {number}", 1), stays=False)
    moved = 0
    for _ in range(60):
        orders = world.wait(0.5)
        moved += sum(order.kind is PROMOTE for order in orders)
        world.obey(orders)
    assert 55 <= moved <= 66  # in 30 s, plus what was saved up before


def test_of_what_is_promoted_only_the_missing_blocks_count():
    setting = SpeculationSetting(least_probability=0.0, move_bytes_per_s=2000.0, order_s=1.0)
    world = World(setting)
    for number in range(2):
        talk = blocks(f"talk {number}", 8)
        world.answer(talk, stays=False)
        world.devices["a"].update(talk[:7])
    assert [order.kind for order in world.wait()] == [PROMOTE, PROMOTE]


def test_a_full_replica_is_sent_no_promotions_for_a_while_but_pins():
    world = World()
    absent, here = blocks("absent", 4), blocks("here", 4)
    world.answer(absent, stays=False)
    world.obey(world.wait(), Outcome.REFUSED_FULL)
    world.answer(here)
    world.answer(blocks("another", 4), stays=False)
    assert summary(world.wait()) == [(PIN, "a", here)]
    kinds = [order.kind for order in world.wait(EVERY_TURN.retry_s)]
    assert PROMOTE in kinds


def test_a_conversation_for_which_there_is_no_room_leaves_its_budget_to_others():
    world = World(budgets={"a": 5})
    world.answer(blocks("refused", 3), stays=False)
    world.obey(world.wait(), Outcome.REFUSED_FULL)
    assert world.count("wanted_blocks") == {"a": 0}
    world.answer(blocks("larger", 5))
    assert summary(world.wait(0.1)) == [(PIN, "a", blocks("larger", 5))]


def test_what_a_replica_has_no_room_for_again_and_again_is_expected_at_the_freest():
    world = World(SpeculationSetting(least_probability=0.0, retry_s=1.0), budgets={"a": 100, "b": 20, "c": 50})
    world.answer(blocks("talk", 4), stays=False)
    replicas = []
    while "c" not in replicas and len(replicas) < 10:
        orders = world.wait(5.0)
        replicas += [order.replica for order in orders]
        world.obey(orders, Outcome.REFUSED_FULL)
    assert replicas == ["a"] * OVERLOADED_REFUSALS + ["c"]


def test_a_promotion_that_is_done_ends_a_row_of_refusals():
    world = World(SpeculationSetting(least_probability=0.0, retry_s=1.0), budgets={"a": 100, "c": 50})
    replicas = []
    for number in range(4 * OVERLOADED_REFUSALS):
        world.answer(blocks(number, 4), stays=False)
        orders = [order for order in world.wait(5.0) if order.kind is PROMOTE]
        replicas += [order.replica for order in orders]
        world.obey(orders, Outcome.REFUSED_FULL if number % OVERLOADED_REFUSALS else Outcome.DONE)
        assert [talk.replica for talk in world.brain._conversations] == ["a"]
        world.arrive(blocks(number, 4))
    assert replicas == ["a"] * (4 * OVERLOADED_REFUSALS)


def test_conversations_of_a_replica_that_is_gone_go_elsewhere():
    world = World(budgets={"a": 100, "b": 20, "c": 50})
    talk = blocks("talk", 4)
    world.answer(talk)
    world.obey(world.wait())
    world.brain.forget_replica(world.now, "a")
    assert summary(world.wait()) == [(PROMOTE, "c", talk)]


def test_a_pin_is_renewed_while_it_is_wanted_and_ends_when_its_turn_has_begun(world):
    talk = blocks("talk", 4)
    world.answer(talk)
    world.obey(world.wait())
    assert world.wait(EVERY_TURN.pin_s / 4) == []
    renewed = world.wait(EVERY_TURN.pin_s / 2)
    assert summary(renewed) == [(PIN, "a", talk)]
    world.obey(renewed)
    world.arrive(talk)
    assert world.wait(UNPIN_AFTER_S / 2) == []
    assert summary(world.wait(UNPIN_AFTER_S)) == [(UNPIN, "a", talk)]


def test_blocks_that_another_pinned_conversation_needs_stay_pinned(world):
    trunk = blocks("system prompt", 2)
    one, two = trunk + blocks("one", 2), trunk + blocks("two", 2)
    world.answer(one)
    world.answer(two)
    world.obey(world.wait())
    world.arrive(one)
    assert summary(world.wait(UNPIN_AFTER_S)) == [(UNPIN, "a", one[2:])]
    world.arrive(two)
    assert summary(world.wait(UNPIN_AFTER_S)) == [(UNPIN, "a", two)]


def test_a_refused_pin_leaves_nothing_counted_as_pinned(world):
    talk = blocks("talk", 4)
    world.answer(talk)
    world.obey(world.wait(), Outcome.REFUSED_GONE)
    assert summary(world.wait(EVERY_TURN.retry_s)) == [(PIN, "a", talk)]
    world.arrive(talk)
    assert summary(world.wait(UNPIN_AFTER_S)) == [(UNPIN, "a", talk)]


def test_a_conversation_that_has_been_silent_to_the_horizon_is_forgotten():
    world = World(SpeculationSetting(least_probability=0.0, horizon_s=100.0))
    talk = blocks("talk", 4)
    world.answer(talk, stays=False)
    world.obey(world.wait())
    world.wait(98.0)
    assert world.count("conversations") == 1
    world.wait(2.0)
    assert (world.count("conversations"), world.count("wasted")) == (0, 1)
    assert world.arrive(talk) is None


def test_after_a_clear_nothing_is_brought_back_and_nothing_stays_pinned(world):
    talk = blocks("talk", 4)
    world.answer(talk)
    world.obey(world.wait())
    world.brain.clear(world.now)
    world.devices["a"].clear()
    assert summary(world.wait()) == [(UNPIN, "a", talk)]
    assert world.wait(100.0) == []
    assert world.count("conversations") == 0


def test_what_is_unlikely_to_come_is_not_moved():
    world = World(SpeculationSetting(least_probability=0.5))
    world.answer(blocks("talk", 4), stays=False)
    assert [world.wait(10.0) for _ in range(20)] == [[]] * 20


def test_conversations_that_were_wanted_are_let_go_when_their_time_is_over():
    world = World(SpeculationSetting(least_probability=0.2))
    for number in range(300):
        talk = blocks(f"talk {number}", 1)
        world.answer(talk)
        world.now += 10.0
        world.arrive(talk)
        world.wait(0.1)
    late = blocks("late", 4)
    world.answer(late)
    kinds = [order.kind for _ in range(200) for order in world.wait() if set(late) & set(order.hashes)]
    assert kinds == [PIN, UNPIN]
    assert world.now > 100


def test_memory_is_bounded_and_the_oldest_are_forgotten_first():
    world = World(SpeculationSetting(most_blocks=10))
    for number in range(5):
        world.answer(blocks(f"talk {number}", 3))
    stats = world.brain.stats()
    assert (stats["conversations"], stats["remembered_blocks"], stats["forgotten"]) == (3, 9, 2)
    assert world.arrive(blocks("talk 0", 3)) is None
    assert world.arrive(blocks("talk 4", 3)) is not None
    world.answer(blocks("larger than all", 11))
    assert world.count("conversations") == 0


def test_turn_numbers_of_requests_that_never_end_are_bounded(monkeypatch):
    monkeypatch.setattr("kvmanager.conversations.MOST_RUNNING", 2)
    known = Conversations(100)
    for name in "abc":
        known.runs(blocks(name, 2), 7)
    turns = [known.add("r", blocks(name, 2), 2, 0.0)[0].turn for name in "abc"]
    assert turns == [1, 7, 7]


def test_the_same_answer_told_twice_is_one_conversation(world):
    world.answer(blocks("talk", 4))
    world.answer(blocks("talk", 4))
    assert (world.count("conversations"), world.count("forgotten")) == (1, 0)


def play(seed, steps=500):
    """A random history; returns all orders. Checks the invariants after each step."""
    rng = random.Random(seed)
    setting = SpeculationSetting(least_probability=0.02, most_blocks=120, horizon_s=300.0, pin_s=20.0)
    world = World(setting, budgets={"a": 30, "b": 20})
    talks, history, pinned = {}, [], defaultdict(set)
    for _ in range(steps):
        name = rng.randrange(20)
        replica = rng.choice("ab")
        match rng.randrange(8):
            case 0 | 1:
                talks[name] = blocks(name, rng.randint(1, 12))
                world.answer(talks[name], replica, rng.randint(0, len(talks[name])), stays=rng.random() < 0.5)
            case 2:
                world.arrive(talks.get(name, []) + blocks("more", 2), replica)
            case 3:
                device = world.devices[replica]
                device -= set(rng.sample(sorted(device), len(device) // 2))
            case 4 if rng.random() < 0.05:
                world.brain.forget_replica(world.now, replica)
                pinned[replica].clear()
                world.brain.set_budget(replica, rng.randint(0, 40))
            case _:
                orders = world.wait(rng.choice((0.0, 0.5, 5.0)))
                for order in orders:
                    if order.kind is UNPIN:
                        pinned[order.replica] -= set(order.hashes)
                    elif order.kind is PIN:
                        pinned[order.replica] |= set(order.hashes)
                    else:
                        assert world.held(order.replica, order.hashes) < len(order.hashes)
                    if rng.random() < 0.8:
                        world.obey([order], rng.choice(tuple(Outcome)))
                history += summary(orders)
        brain = world.brain
        stats = brain.stats()
        assert stats["remembered_blocks"] == sum(talk.blocks for talk in brain._conversations) <= 120
        assert stats["next_turns"] == stats["found"] + stats["missed"]
        assert stats["used"] + stats["wasted"] <= stats["promoted"]
        for desk in brain._desks.values():
            assert desk.wanted.blocks == sum(talk.blocks for talk in desk.wanted)
        assert set(brain._under_way) == {c.order_id for c in brain._conversations} - {0}
    for _ in range(3):
        for order in world.wait(400.0):
            assert order.kind is UNPIN
            pinned[order.replica] -= set(order.hashes)
    assert not any(pinned.values())
    assert world.count("conversations") == len(world.brain._ages) == 0
    assert all(desk.wanted.blocks == 0 and not desk.pins._counts for desk in world.brain._desks.values())
    return history


@pytest.mark.parametrize("seed", range(3))
def test_random_histories_keep_the_books_and_end_with_nothing_pinned(seed):
    assert play(seed) == play(seed), "the same history gives the same orders"
