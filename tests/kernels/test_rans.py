import threading
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.entropy import rans, rans_cpu, rans_reference
from kernels.entropy.rans import SymbolTable, coded_bound
from kernels.errors import CodecError

# The least length with an interleaved part is 144; a group is 16 symbols.
LENGTHS = (0, 1, 2, 15, 16, 17, 127, 128, 129, 143, 144, 145, 159, 160, 161, 1000, 4099)

both_ways = pytest.mark.parametrize("vectors", [True, False], ids=["vectors", "lanes in turn"])


def encode(symbols: np.ndarray, table: SymbolTable, vectors: bool) -> np.ndarray:
    """The compiled encoder between two strips of canaries, in exactly the memory that it may use."""
    bound = coded_bound(len(symbols))
    memory = np.full(64 + bound + 64, 0xA5, dtype=np.uint8)
    begin = rans_cpu.encode_cpu(symbols, table, memory[64 : 64 + bound], vectors)
    assert (memory[:64] == 0xA5).all()
    assert (memory[64 + bound :] == 0xA5).all()
    return memory[64 + begin : 64 + bound].copy()


def decode(coded: np.ndarray, table: SymbolTable, count: int, vectors: bool) -> np.ndarray:
    memory = np.full(64 + count + 64, 0xA5, dtype=np.uint8)
    rans_cpu.decode_cpu(coded, table, memory[64 : 64 + count], vectors)
    assert (memory[:64] == 0xA5).all()
    assert (memory[64 + count :] == 0xA5).all()
    return memory[64 : 64 + count].copy()


def gaussian(count: int, deviation: float, middle: int = 15, seed: int = 0) -> np.ndarray:
    noise = np.random.default_rng(seed).normal(middle, deviation, count)
    return np.clip(np.rint(noise), 0, 2 * middle).astype(np.uint8)


def table_of(symbols: np.ndarray, alphabet: int = 256, strict: bool = False) -> SymbolTable:
    return SymbolTable.from_counts(np.bincount(symbols, minlength=alphabet), strict=strict)


@st.composite
def tables(draw: st.DrawFn) -> SymbolTable:
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    counts = (2 ** rng.uniform(-draw(st.integers(0, 40)), 20, draw(st.integers(1, 256)))).astype(np.int64)
    return SymbolTable.from_counts(counts, strict=draw(st.booleans()) and bool(counts.any()))


@st.composite
def tables_and_symbols(draw: st.DrawFn) -> tuple[SymbolTable, np.ndarray]:
    """A table and symbols that it can code, drawn by its frequencies or by equal chances."""
    table = draw(tables())
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    weights = table.frequencies if draw(st.booleans()) else table.frequencies > 0
    chances = weights / weights.sum(dtype=int)
    count = draw(st.one_of(st.integers(0, 700), st.sampled_from(LENGTHS)))
    return table, rng.choice(len(chances), size=count, p=chances).astype(np.uint8)


@settings(max_examples=80)
@given(tables_and_symbols())
def test_compiled_coder_writes_what_the_reference_writes_and_reads_it_back(case):
    table, symbols = case
    expected = rans_reference.encode(symbols, table)
    out = np.empty_like(symbols)
    rans_reference.decode(expected.tobytes(), table, out)
    np.testing.assert_array_equal(out, symbols)
    for vectors in (True, False):
        np.testing.assert_array_equal(encode(symbols, table, vectors), expected)
        np.testing.assert_array_equal(decode(expected, table, len(symbols), vectors), symbols)


@both_ways
@pytest.mark.parametrize("count", LENGTHS)
def test_every_length_comes_back(count, vectors):
    symbols = gaussian(count, 1.5)
    table = table_of(gaussian(5000, 1.5), 31)
    np.testing.assert_array_equal(decode(encode(symbols, table, vectors), table, count, vectors), symbols)


def test_a_million_symbols_come_back_through_the_public_functions():
    symbols = gaussian(1_000_003, 1.4)
    table = table_of(symbols, 31)
    coded = rans.encode(symbols, table)
    out = np.empty_like(symbols)
    rans.decode(coded, table, out)
    np.testing.assert_array_equal(out, symbols)
    np.testing.assert_array_equal(coded, encode(symbols, table, vectors=False))
    np.testing.assert_array_equal(decode(coded, table, len(symbols), vectors=False), symbols)


@both_ways
@pytest.mark.parametrize("count", [0, 5, 144, 100_000])
def test_the_only_symbol_of_a_table_takes_no_bits(count, vectors):
    table = SymbolTable.from_counts(np.array([0, 0, 9]), strict=True)
    symbols = np.full(count, 2, dtype=np.uint8)
    coded = encode(symbols, table, vectors)
    assert len(coded) == (4 if count < 144 else 64)
    np.testing.assert_array_equal(decode(coded, table, count, vectors), symbols)


@both_ways
@pytest.mark.parametrize("count", [10_000, 32_768, 200_001])
@pytest.mark.parametrize("deviation", [0.95, 1.4, 2.5, 6.0])
def test_bits_are_within_a_hundredth_of_the_tables_entropy(deviation, count, vectors):
    symbols = gaussian(count, deviation)
    counts = np.bincount(symbols, minlength=31)
    table = SymbolTable.from_counts(counts)
    entropy = table.entropy_bits(counts)
    assert entropy / count > 1.9
    assert entropy <= 8 * len(encode(symbols, table, vectors)) <= 1.01 * entropy


@pytest.mark.parametrize("scale", [0.02, 1.0, 30.0])
def test_bits_of_exponents_are_within_a_hundredth_of_what_is_in_their_counts(scale):
    values = np.random.default_rng(1).normal(0, scale, 32_768).astype(np.float32)
    exponents = (values.view(np.uint32) >> 23 & 0xFF).astype(np.uint8)
    counts = np.bincount(exponents)
    shares = counts[counts > 0] / len(exponents)
    information = -(shares * np.log2(shares)).sum() * len(exponents)
    table = SymbolTable.from_counts(counts, strict=True)
    assert 8 * len(rans.encode(exponents, table)) <= 1.01 * information


@both_ways
@pytest.mark.parametrize("count", [*LENGTHS, 300_000])
def test_the_least_frequent_symbol_alone_stays_within_the_bound(count, vectors):
    table = SymbolTable.from_counts(np.array([1, 10**9, 1]))
    for symbol in (0, 2):
        symbols = np.full(count, symbol, dtype=np.uint8)
        coded = encode(symbols, table, vectors)
        assert len(coded) <= coded_bound(count)
        np.testing.assert_array_equal(decode(coded, table, count, vectors), symbols)


@both_ways
@pytest.mark.parametrize("where", [0, 7, 500, 998])
@pytest.mark.parametrize("symbol", [1, 4, 255])
def test_symbol_without_a_frequency_is_refused_wherever_it_is(symbol, where, vectors):
    table = SymbolTable.from_counts(np.array([5, 0, 3, 1]), strict=True)
    symbols = np.zeros(999, dtype=np.uint8)
    symbols[where] = symbol
    with pytest.raises(ValueError, match="no frequency"):
        encode(symbols, table, vectors)
    with pytest.raises(ValueError, match="no frequency"):
        rans_reference.encode(symbols, table)


@both_ways
@pytest.mark.parametrize("count", [0, 1, 100, 144, 1000])
def test_stream_with_bytes_missing_or_left_over_is_an_error(count, vectors):
    symbols = gaussian(count, 1.5)
    table = table_of(gaussian(5000, 1.5), 31)
    coded = encode(symbols, table, vectors)
    for keep in range(len(coded)):
        with pytest.raises(CodecError):
            decode(coded[:keep], table, count, vectors)
    for more in (b"\0", b"\0\0", b"\1\2\3\4", bytes(64)):
        with pytest.raises(CodecError):
            decode(np.concatenate([coded, np.frombuffer(more, dtype=np.uint8)]), table, count, vectors)


@both_ways
@pytest.mark.parametrize("other", [0, 143, 144, 999, 1001, 1016, 50_000])
def test_stream_of_another_number_of_symbols_is_an_error(other, vectors):
    symbols = gaussian(1000, 1.5)
    table = table_of(symbols, 31)
    coded = encode(symbols, table, vectors)
    with pytest.raises(CodecError):
        decode(coded, table, other, vectors)


@both_ways
@pytest.mark.parametrize("count", [100, 1000])
def test_stream_of_another_table_is_an_error(count, vectors):
    symbols = gaussian(count, 1.5)
    coded = encode(symbols, table_of(symbols, 31), vectors)
    with pytest.raises(CodecError):
        decode(coded, table_of(gaussian(5000, 2.5), 31), count, vectors)


@both_ways
def test_lane_that_did_not_begin_as_the_encoder_begins_is_an_error(vectors):
    table = SymbolTable.from_counts(np.array([9]))  # takes no bits, so that states end as they are written
    for lane in range(16):
        for state in (0, 0xFFFF, 0x10001, 0x20000, 0x80000000):
            coded = np.full(16, 0x10000, dtype=np.uint32)
            decode(coded.view(np.uint8), table, 1000, vectors)
            coded[lane] = state
            with pytest.raises(CodecError):
                decode(coded.view(np.uint8), table, 1000, vectors)


def test_decoder_takes_no_memory_but_its_output():
    symbols = gaussian(1_000_000, 1.4)
    table = table_of(symbols, 31)
    coded, out = rans.encode(symbols, table), np.empty_like(symbols)
    rans.decode(coded, table, out)  # the table's entries are made once
    tracemalloc.start()
    rans.decode(coded, table, out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 10_000


@pytest.mark.parametrize("wrap", [bytes, bytearray, memoryview, lambda coded: np.frombuffer(coded, dtype=np.uint8)])
@pytest.mark.parametrize("offset", [0, 1, 3])
def test_stream_may_lie_anywhere_and_be_read_only(offset, wrap):
    symbols = gaussian(2000, 1.5)
    table = table_of(symbols)
    coded = wrap(bytes(offset) + rans.encode(symbols, table).tobytes())
    out = np.empty_like(symbols)
    rans.decode(memoryview(coded)[offset:] if offset else coded, table, out)
    np.testing.assert_array_equal(out, symbols)


def test_empty_buffer_is_an_error_not_a_stream():
    with pytest.raises(CodecError):
        rans.decode(b"", SymbolTable.from_counts(np.ones(3)), np.empty(0, dtype=np.uint8))


@pytest.mark.parametrize(
    "array", [np.zeros(20, dtype=np.int8), np.zeros((4, 5), dtype=np.uint8), np.zeros(40, dtype=np.uint8)[::2]]
)
def test_arrays_of_another_kind_are_refused(array):
    table = SymbolTable.from_counts(np.ones(3))
    with pytest.raises(ValueError, match="contiguous uint8"):
        rans.encode(array, table)
    with pytest.raises(ValueError, match="contiguous uint8"):
        rans.decode(b"", table, array)


def test_output_that_may_not_be_written_is_refused_and_left_alone():
    symbols = gaussian(200, 1.5)
    table = table_of(symbols)
    memory = bytes(200)
    with pytest.raises(ValueError, match="writable"):
        rans.decode(rans.encode(symbols, table), table, np.frombuffer(memory, dtype=np.uint8))
    assert memory == bytes(200)


def test_threads_share_a_table():
    planes = [gaussian(50_000, 1.4, seed=seed) for seed in range(8)]
    table = table_of(np.concatenate(planes), 31)
    outs = [np.empty_like(plane) for plane in planes]

    def work(index: int) -> None:
        rans.decode(rans.encode(planes[index], table), table, outs[index])

    threads = [threading.Thread(target=work, args=(index,)) for index in range(len(planes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for plane, out in zip(planes, outs, strict=True):
        np.testing.assert_array_equal(out, plane)
