"""What is wanted on one device, and which pinned blocks nobody needs any more."""

from kvmanager.conversations import Conversation
from kvmanager.keys import BlockHash
from kvmanager.wanted_set import MOST_TRIES, PinCounts, WantedSet


def blocks(name, count):
    """Hashes of a conversation's blocks."""
    return [BlockHash(f"{name}/{number}".encode().ljust(32, b".")) for number in range(count)]


def scored(score, size):
    conversation = Conversation("a", blocks(score, size), (), 1, 0.0)
    conversation.score = score
    return conversation


def wanted_set(*conversations, budget=10, advantage=1.5):
    wanted = WantedSet(advantage)
    wanted.budget_blocks = budget
    for conversation in conversations:
        wanted.offer(conversation)
    wanted.choose()
    return wanted


def test_what_is_worth_clearly_more_takes_the_place_of_what_is_worth_least():
    low, middle, high = scored(1.0, 5), scored(1.2, 5), scored(2.0, 5)
    wanted = wanted_set(low, middle)
    wanted.offer(high)
    assert wanted.choose() == [low]
    assert (set(wanted), wanted.blocks) == ({middle, high}, 10)
    wanted.remove(middle)
    assert wanted.choose() == []
    assert set(wanted) == {low, high}, "what lost its place waits for room"


def test_of_those_that_wait_the_one_worth_most_is_first():
    low, high = scored(1.0, 6), scored(1.2, 6)
    assert set(wanted_set(low, high)) == {high}
    low, high = scored(1.0, 6), scored(1.2, 6)
    assert set(wanted_set(high, low)) == {high}


def test_what_is_worth_little_more_takes_no_place():
    low, other = scored(1.0, 5), scored(1.4, 6)
    wanted = wanted_set(low)
    wanted.offer(other)
    assert wanted.choose() == []
    assert set(wanted) == {low}


def test_nothing_is_dropped_for_what_then_finds_no_room():
    low, high, large = scored(1.0, 5), scored(9.0, 5), scored(3.0, 8)
    wanted = wanted_set(low, high)
    wanted.offer(large)
    assert wanted.choose() == []
    assert (set(wanted), wanted.blocks) == ({low, high}, 10)
    wanted.remove(high)
    assert wanted.choose() == [low], "its place in the heap was given back to it"


def test_a_new_worth_counts_for_what_is_wanted_and_for_what_waits():
    first, second = scored(5.0, 6), scored(1.0, 6)
    wanted = wanted_set(first, second)
    first.score, second.score = 1.0, 5.0
    wanted.offer(first)
    wanted.offer(second)
    assert wanted.choose() == [first]


def test_what_fits_no_budget_hides_nothing():
    small = scored(1.0, 10)
    wanted = wanted_set(*(scored(9.0 + number, 11) for number in range(2 * MOST_TRIES)), small)
    assert set(wanted) == {small}


def test_a_larger_budget_lets_in_what_is_offered_again():
    large = scored(1.0, 11)
    wanted = wanted_set(large)
    wanted.budget_blocks = 11
    assert set(wanted) == set()
    wanted.offer(large)
    wanted.choose()
    assert set(wanted) == {large}


def test_pin_counts_name_what_nobody_needs():
    counts = PinCounts()
    counts.add(blocks("a", 3))
    counts.add(blocks("a", 2))
    assert counts.take(blocks("a", 3)) == blocks("a", 3)[2:]
    assert counts.take(blocks("a", 2)) == blocks("a", 2)
