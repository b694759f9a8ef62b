import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernels.entropy.symbol_table import SymbolTable

counts_lists = st.lists(st.one_of(st.integers(0, 20), st.integers(0, 2**50)), min_size=1, max_size=256)


@settings(max_examples=100)
@given(counts_lists, st.booleans())
def test_frequencies_fill_the_slots_and_leave_out_only_what_they_may(values, strict):
    counts = np.array(values, dtype=np.int64)
    if strict and not counts.any():
        return
    frequencies = SymbolTable.from_counts(counts, strict=strict).frequencies
    assert frequencies.dtype == np.uint16
    assert len(frequencies) == len(counts)
    assert frequencies.sum(dtype=int) == 4096
    np.testing.assert_array_equal(frequencies > 0, (counts > 0) | (not strict))


@settings(max_examples=100)
@example([6, 6, 6, 6, 9339])  # the frequent one has two slots to give
@given(counts_lists)
def test_no_slot_is_better_given_to_another_symbol(values):
    counts = np.array(values, dtype=np.float64)
    table = SymbolTable.from_counts(counts)
    frequencies = table.frequencies.astype(float)
    with np.errstate(divide="ignore", invalid="ignore"):
        gain = counts * np.log2((frequencies + 1) / frequencies)
        loss = np.where(frequencies > 1, counts * np.log2(frequencies / (frequencies - 1)), np.inf)
    best = gain[:, None] - loss[None, :]
    np.fill_diagonal(best, 0)
    assert best.max() <= 1e-9 * max(table.entropy_bits(counts), 1.0)


def test_entropy_is_the_bits_of_ideal_coding():
    table = SymbolTable.from_counts(np.array([2, 1, 1]))
    assert table.frequencies.tolist() == [2048, 1024, 1024]
    assert table.entropy_bits(np.array([10, 5, 0])) == 10 * 1 + 5 * 2
    assert table.entropy_bits(np.zeros(3)) == 0
    assert table.entropy_bits(np.array([1, 0, 0, 0])) == 1


def test_symbols_without_a_slot_take_infinitely_many_bits():
    table = SymbolTable.from_counts(np.array([2, 0, 1]), strict=True)
    assert table.entropy_bits(np.array([0, 1])) == float("inf")
    assert table.entropy_bits(np.array([0, 0, 0, 1])) == float("inf")


@pytest.mark.parametrize("counts", [[], [1, -1], [[1, 2]], [1] * 257, [float("nan"), 1], [float("inf")]])
def test_counts_that_are_none_are_refused(counts):
    with pytest.raises(ValueError, match="counts"):
        SymbolTable.from_counts(np.array(counts))


def test_strict_table_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one symbol"):
        SymbolTable.from_counts(np.zeros(4), strict=True)


@pytest.mark.parametrize(
    "frequencies",
    [
        np.array([4095], dtype=np.uint16),
        np.array([4096, 4096], dtype=np.uint16),
        np.array([4097, -1], dtype=np.int64),
        np.zeros(0, dtype=np.uint16),
        np.full(257, 1, dtype=np.uint16),
        np.full((2, 2), 1024, dtype=np.uint16),
    ],
)
def test_frequencies_that_are_no_table_are_refused(frequencies):
    with pytest.raises(ValueError, match="symbol table"):
        SymbolTable(frequencies)


def test_table_cannot_be_altered():
    given_frequencies = np.array([4000, 96], dtype=np.uint16)
    table = SymbolTable(given_frequencies)
    given_frequencies[0] = 1
    assert table.frequencies.tolist() == [4000, 96]
    with pytest.raises(ValueError, match="read-only"):
        table.frequencies[0] = 1


@settings(max_examples=100)
@given(counts_lists, st.booleans())
def test_serialised_table_comes_back(values, strict):
    counts = np.array(values, dtype=np.int64)
    table = SymbolTable.from_counts(counts, strict=strict and bool(counts.any()))
    coded = table.to_bytes()
    assert len(coded) <= 1 + 2 * len(counts)
    again = SymbolTable.from_bytes(coded)
    np.testing.assert_array_equal(again.frequencies, table.frequencies)
    assert again.to_bytes() == coded


def test_table_of_exponents_takes_few_bytes():
    counts = np.zeros(256, dtype=np.int64)
    counts[110:130] = 2 ** np.arange(20)
    assert len(SymbolTable.from_counts(counts, strict=True).to_bytes()) <= 40


@pytest.mark.parametrize(
    ("coded", "why"),
    [
        (b"", "empty"),
        (b"\x00", "no frequency"),
        (b"\x00\x80", "half a frequency"),
        (b"\x01\x80\x20\x00", "half a run"),
        (b"\x00\xff\x1f", "sums to 4095"),
        (b"\x00\x81\x20", "sums to 4097"),
        (b"\x01\x80\x20", "a symbol less than promised"),
        (b"\x00\x80\x20\x00\x00", "a symbol more than promised"),
        (b"\x02\x80\x20\x00\x00\x00\x00", "zeros in two runs"),
        (b"\x01\xff\x1f\x81\x00", "a frequency longer than need be"),
        (b"\x00\x80\x20\x00\xff", "257 symbols"),
        (b"\xff\x80\x20" + b"\x01" * 300, "300 symbols"),
        (b"\x00\x80\xa0", "wraps 16 bits"),
    ],
)
def test_malformed_table_is_refused(coded, why):
    with pytest.raises(ValueError, match="serialised symbol table"):
        SymbolTable.from_bytes(coded)


def test_bytes_are_either_refused_or_the_very_ones_of_a_table():
    rng = np.random.default_rng(3)
    counts = [rng.integers(0, 2 ** rng.integers(1, 20), rng.integers(1, 257)) for _ in range(20)]
    whole = [SymbolTable.from_counts(c + (c.sum() == 0), strict=True).to_bytes() for c in counts]
    accepted = 0
    for step in range(4000):
        coded = bytearray(whole[step % len(whole)])
        for _ in range(rng.integers(1, 3)):
            coded[rng.integers(len(coded))] = rng.integers(256)
        if step % 3 == 0:
            coded = coded[: rng.integers(len(coded) + 1)]
        try:
            table = SymbolTable.from_bytes(coded)
        except ValueError:
            continue
        accepted += 1
        assert table.to_bytes() == coded
        assert table.decoding_entries.shape == (4096,)
    assert accepted < 1000
