"""Where prompts part and come together again."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.divergence.divergence import MOST_APART, common, divergence

ALIKE = 8
REST = list(range(100, 100 + ALIKE))
LONG = list(range(1000, 1000 + 80))
words = st.lists(st.integers(0, 9), max_size=40)


def ids(*parts: list[int]) -> bytes:
    return array("i", [token for part in parts for token in part]).tobytes()


@given(words, words, words, words)
def test_prompts_with_the_same_text_behind_come_together_where_it_begins(shared, one, other, rest):
    first, second = ids(shared, one, REST, LONG, rest), ids(shared, other, REST, LONG, rest)
    where = divergence(first, second, ALIKE)
    if first == second:
        assert where is None
        return
    assert where is not None
    tokens = array("i", first), array("i", second)
    assert where.shared == common(first, second)
    assert tokens[0][: where.shared] == tokens[1][: where.shared]
    assert tokens[0][where.end : where.end + ALIKE] == tokens[1][where.other_end : where.other_end + ALIKE]
    assert max(where.end, where.other_end) - where.shared <= max(len(one), len(other)) + ALIKE
    assert tokens[0][where.end - 1] != tokens[1][where.other_end - 1] or where.shared in (where.end, where.other_end)


@given(words, words)
def test_prompts_with_nothing_in_common_behind_never_do(one, other):
    first, second = ids([1], one, list(range(200, 300))), ids([1], other, list(range(400, 500)))
    assert divergence(first, second, ALIKE) is None


@pytest.mark.parametrize(("apart", "meet"), [(MOST_APART - 1, True), (MOST_APART + ALIKE + 1, False)])
def test_a_piece_may_be_long_but_not_longer_than_is_looked_through(apart, meet):
    rest = list(range(1000, 1600))
    piece = list(range(5000, 5000 + apart))
    assert (divergence(ids(piece, rest), ids(rest), 200) is not None) is meet
    assert (divergence(ids(rest), ids(piece, rest), 200) is not None) is meet


def test_how_far_two_prompts_are_the_same():
    pairs = ([], [1]), ([1, 2], [1, 2]), ([1, 2], [1]), ([1, 2, 3], [1, 3])
    assert [common(ids(one), ids(other)) for one, other in pairs] == [0, 2, 1, 1]


def test_the_beginning_of_another_prompt_does_not_part_from_it():
    assert divergence(ids(REST * 3), ids(REST * 2), ALIKE) is None


def test_bytes_that_look_the_same_between_two_tokens_are_not_the_same_tokens():
    first = array("i", [7, *[256] * 40]).tobytes()
    assert divergence(first, array("i", [9, *[65536] * 40]).tobytes(), ALIKE) is None
