"""Budgets of sparse KV: whole blocks, never none, and a digest that two tables never share."""

from fractions import Fraction

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvmanager.extensions.sparse.budgets import EIGHTHS, LEVELS, UNIFORM, Budgets

EIGHTH_TABLES = st.lists(st.integers(1, EIGHTHS), min_size=1, max_size=8)


@pytest.mark.parametrize(
    ("eighths", "blocks", "kept"), [(1, 8, 1), (3, 8, 3), (8, 8, 8), (1, 16, 2), (1, 1, 1), (3, 5, 2)]
)
def test_a_share_is_rounded_up_to_whole_blocks(eighths, blocks, kept):
    assert Budgets.of_eighths([8, eighths]).kept_blocks(1, blocks) == kept


def test_uniform_levels_keep_what_their_names_say_or_up_to_a_block_more():
    kept = {level: Budgets.uniform(level, 2).kept_blocks(1, 8) for level in UNIFORM}
    assert kept == {"75": 6, "50": 4, "20": 2}
    assert Budgets.uniform("20", 2).kept_blocks(0, 20) == 4


@given(EIGHTH_TABLES, st.integers(1, 64))
def test_no_layer_keeps_nothing_or_more_than_all(eighths, blocks):
    budgets = Budgets.of_eighths(eighths)
    kept = [budgets.kept_blocks(layer, blocks) for layer in range(len(eighths))]
    assert all(1 <= each <= blocks for each in kept)


@given(EIGHTH_TABLES, EIGHTH_TABLES, st.integers(0, 16), st.integers(0, 16))
def test_tables_share_a_digest_only_where_they_keep_the_same(one, other, recent, less):
    first, second = Budgets.of_eighths(one, recent), Budgets.of_eighths(other, less)
    assert (first.digest == second.digest) == ((one, recent) == (other, less))
    assert 0 < first.header_level < 1 << 16
    assert first.header_level not in {int(level) for level in UNIFORM}


def test_every_level_has_a_digest_and_a_header_level_of_its_own():
    tables = [Budgets.of_eighths([8, 1])] + [Budgets.uniform(level, 2) for level in UNIFORM]
    assert len({each.digest for each in tables}) == len({each.header_level for each in tables}) == len(LEVELS)


@pytest.mark.parametrize(
    ("level", "shares", "recent"),
    [
        ("layers", (), 8), ("layers", (Fraction(0),), 8), ("layers", (Fraction(9, 8),), 8),
        ("layers", (Fraction(1, 3),), 8), ("75", (Fraction(1, 2),), 8), ("30", (Fraction(3, 10),), 8),
        ("layers", (Fraction(1),), -1),
    ],
)  # fmt: skip
def test_what_is_no_table_is_refused(level, shares, recent):
    with pytest.raises(ValueError, match=r"budget|level"):
        Budgets(level, shares, recent)
