"""Which tokens are kept: the heaviest, each head its own, ties and all."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given

from kernels.sparse.kept_layer import kept_tokens


def test_the_heaviest_are_kept_in_their_order():
    mass = np.array([[1, 9, 3, 7], [8, 1, 2, 4]], np.float16)
    assert kept_tokens(mass, 2).tolist() == [[1, 3], [0, 3]]
    assert kept_tokens(mass, 4).tolist() == [[0, 1, 2, 3]] * 2


def test_of_equal_masses_the_earlier_token_is_kept():
    assert kept_tokens(np.full((1, 256), 0.5, np.float16), 3).tolist() == [[0, 1, 2]]
    assert kept_tokens(np.array([[1, 2, 2, 2, 3]], np.float16), 3).tolist() == [[1, 2, 4]]


def test_recent_tokens_are_kept_whatever_their_mass():
    mass = np.array([[5, 4, 3, 0, 0, np.inf, 0, 0]], np.float16)
    assert kept_tokens(mass, 4, recent=2).tolist() == [[0, 5, 6, 7]]
    assert kept_tokens(mass, 2, recent=2).tolist() == [[6, 7]]


def test_what_is_no_number_is_the_least():
    assert kept_tokens(np.array([[np.nan, 0, np.nan, 1]], np.float16), 2).tolist() == [[1, 3]]
    assert kept_tokens(np.array([[np.nan, np.inf, -np.inf, 1]], np.float16), 2).tolist() == [[1, 3]]


@pytest.mark.parametrize(("count", "recent"), [(0, 0), (5, 0), (2, 3), (2, -1)])
def test_what_cannot_be_kept_is_refused(count, recent):
    with pytest.raises(ValueError, match="cannot be kept"):
        kept_tokens(np.ones((2, 4), np.float16), count, recent)


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0, float("nan"), float("inf")]), min_size=1, max_size=40), st.data())
def test_any_choice_is_ascending_has_its_count_and_leaves_nothing_heavier(values, data):
    mass = np.array([values, values[::-1]], np.float16)
    count = data.draw(st.integers(1, len(values)))
    recent = data.draw(st.integers(0, count))
    found = kept_tokens(mass, count, recent)
    assert found.shape == (2, count)
    assert (np.diff(found.astype(int), axis=1) > 0).all()
    for row, kept in zip(np.nan_to_num(mass, nan=-1), found, strict=True):
        older = kept[: count - recent]
        assert kept[count - recent :].tolist() == list(range(len(row) - recent, len(row)))
        left = np.setdiff1d(np.arange(len(row) - recent), older)
        if len(older) and len(left):
            assert row[older].min() >= row[left].max()
