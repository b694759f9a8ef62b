"""The compiled quantizers give the reference's bits, stay within their error bounds, and refuse what does not fit."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.packing import pack_reference, packed_bytes, unpack_reference
from kernels.quant import (
    dequantize_groups,
    dequantize_steps,
    dequantize_vectors,
    normal_codebook,
    quantize_groups,
    quantize_steps,
    quantize_vectors,
)
from kernels.quant_reference import (
    dequantize_groups_reference,
    dequantize_steps_reference,
    dequantize_vectors_reference,
    quantize_groups_reference,
    quantize_steps_reference,
    quantize_vectors_reference,
)

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GROUPS = (1, 3, 8, 31, 32, 33, 64, 80, 128)
ODD_VALUES = (float("nan"), float("inf"), -float("inf"), -0.0, 3e38, -7e4, 1e-7, 1e-42)


def same_bits(a, b):
    """Equal as bytes: comparing floats would call -0.0 the same as 0.0."""
    return a.dtype is b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@st.composite
def matrices(draw, columns, odd=True):
    """Normal values of any size around any mean; with ``odd``, what no KV should hold is strewn in."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    x = torch.randn(draw(st.integers(1, 5)), columns, generator=generator)
    x = x * 10.0 ** draw(st.integers(-6, 3)) + draw(st.sampled_from([0.0, 1.0, -300.0]))
    if odd and draw(st.booleans()):
        x.view(-1)[torch.randint(x.numel(), (4,), generator=generator)] = torch.tensor(
            draw(st.lists(st.sampled_from(ODD_VALUES), min_size=4, max_size=4))
        )
    return x.to(draw(st.sampled_from(DTYPES)))


@st.composite
def grouped(draw, odd=True):
    group = draw(st.sampled_from(GROUPS))
    return draw(matrices(group * draw(st.integers(1, 3)), odd)), draw(st.integers(2, 8)), group


@settings(deadline=None, max_examples=100)
@given(grouped(), st.sampled_from(DTYPES))
def test_groups_equal_reference(case, out_dtype):
    x, bits, group = case
    encoded, expected = quantize_groups(x, bits, group), quantize_groups_reference(x, bits, group)
    assert all(same_bits(a, b) for a, b in zip(encoded, expected, strict=True))
    out, expected_out = torch.empty(2, *x.shape, dtype=out_dtype)
    dequantize_groups(*encoded, bits, out)
    dequantize_groups_reference(*expected, bits, expected_out)
    assert same_bits(out, expected_out)
    assert out.isfinite().all()


@settings(deadline=None, max_examples=50)
@given(grouped(odd=False))
def test_a_grouped_value_returns_within_half_a_scale(case):
    x, bits, group = case
    encoded = quantize_groups(x, bits, group)
    out = torch.empty(x.shape)
    dequantize_groups(*encoded, bits, out)
    scale = encoded[1].float().repeat_interleave(group, dim=1)
    error = (out - x.float()).abs()
    assert (error <= scale / 2 + x.float().abs().clamp(min=1e-30) * 2e-6 + scale * 2e-5).all()


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 70), st.integers(2, 8), st.integers(0, 2**32))
def test_packed_codes_are_one_string_of_bits_in_little_endian_order(cols, bits, seed):
    codes = torch.randint(2**bits, (2, cols), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    packed = pack_reference(codes, bits)
    for row, packed_row in zip(codes.tolist(), packed.tolist(), strict=True):
        string = sum(code << (position * bits) for position, code in enumerate(row))
        assert bytes(packed_row) == string.to_bytes(packed_bytes(cols, bits), "little")
    assert torch.equal(unpack_reference(packed, bits, cols), codes)


@settings(deadline=None, max_examples=50)
@given(st.integers(1, 3), st.sampled_from(GROUPS), st.integers(2, 8), st.integers(0, 2**32), st.sampled_from(DTYPES))
def test_any_bytes_decode_as_the_reference_decodes_them(groups, group, bits, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, (3, packed_bytes(groups * group, bits)), dtype=torch.uint8, generator=generator)
    scale, zero = (
        torch.randint(-(2**15), 2**15, (2, 3, groups), generator=generator).to(torch.int16).view(torch.float16)
    )
    out, expected = torch.empty(2, 3, groups * group, dtype=dtype)
    dequantize_groups(codes, scale, zero, bits, out)
    dequantize_groups_reference(codes, scale, zero, bits, expected)
    assert torch.equal(out.isnan(), expected.isnan())
    assert same_bits(out.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [4, 8])
def test_a_scale_or_zero_that_is_no_number_gives_none(bits, dtype):
    nan = torch.tensor([0x7FFF], dtype=torch.int16).view(torch.float16)  # rounding it as a number would make a zero
    codes, one = torch.full((1, packed_bytes(64, bits)), 17, dtype=torch.uint8), torch.ones(1, dtype=torch.float16)
    for scale, zero in ((nan, one), (one, nan)):
        out = torch.empty(1, 64, dtype=dtype)
        dequantize_groups(codes, scale.view(1, 1), zero.view(1, 1), bits, out)
        assert out.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_steps_that_are_no_numbers_decode_as_the_reference_decodes_them(dtype):
    step = torch.tensor([1.0, float("inf"), 0.0, 1e38])
    step.view(torch.int32)[2] = 0x7FFFFFFF  # a NaN that rounding as a number would make a zero
    symbols = torch.tensor([[0, 3, 3, 6], [6, 0, 0, 0]], dtype=torch.uint8)
    out, expected = torch.empty(2, 2, 4, dtype=dtype)
    dequantize_steps(symbols, step, 3, out)
    dequantize_steps_reference(symbols, step, 3, expected)
    assert torch.equal(out.isnan(), expected.isnan())
    assert same_bits(out.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [0.0, -1.5, 1024.0])
def test_a_constant_group_returns_exactly(value, dtype):
    x = torch.full((2, 64), value, dtype=dtype)
    codes, scale, zero = quantize_groups(x, 4, 32)
    assert (scale == 0).all()
    out = torch.empty_like(x)
    dequantize_groups(codes, scale, zero, 4, out)
    assert torch.equal(out, x)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_packed_vectors_decode_as_the_reference_decodes_them(bits, dtype):
    """Rows of every length around what is looked up at once, and nothing behind the last code of the last row."""
    generator = torch.Generator().manual_seed(bits)
    codebook = torch.rand(2**bits, generator=generator).mul(2).sub(1).sort().values
    assert len(codebook.unique()) == len(codebook)
    for cols in (1, 2, 7, 8, 9, 15, 16, 17, 31, 32, 33, 63, 64, 65, 96, 127, 128, 129, 257):
        for rows in (1, 3):
            codes = torch.randint(256, (rows, packed_bytes(cols, bits)), dtype=torch.uint8, generator=generator)
            scale = torch.randint(-(2**15), 2**15, (rows,), generator=generator).to(torch.int16).view(torch.float16)
            around = torch.full(
                (
                    2,
                    rows * cols + 2,
                ),
                7.0,
                dtype=dtype,
            )
            out, expected = around[:, 1:-1].view(2, rows, cols)
            dequantize_vectors(codes, scale, codebook, out)
            dequantize_vectors_reference(codes, scale, codebook, expected)
            assert torch.equal(out.isnan(), expected.isnan()), (cols, rows)
            assert same_bits(out.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0)), (cols, rows)
            assert (around[:, [0, -1]] == 7.0).all(), (cols, rows)


def test_nan_counts_as_zero_and_infinity_is_clamped():
    x = torch.tensor([[float("nan"), float("inf"), -float("inf"), 1.0]])
    out = torch.empty_like(x)
    dequantize_groups(*quantize_groups(x, 8, 1), 8, out)
    assert out.tolist() == [[0.0, 32768.0, -32768.0, 1.0]]
    codebook = normal_codebook(8)
    dequantize_vectors(*quantize_vectors(x.view(4, 1), codebook), codebook, out.view(4, 1))
    assert out.tolist() == [[0.0, 32768.0, -32768.0, 1.0]]
    assert quantize_steps(x, torch.full((4,), 0.5), 3).tolist() == [[3, 6, 0, 5]]


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 130).flatmap(matrices), st.integers(2, 8), st.sampled_from(DTYPES))
def test_vectors_equal_reference(x, bits, out_dtype):
    codebook = normal_codebook(bits)
    encoded, expected = quantize_vectors(x, codebook), quantize_vectors_reference(x, codebook)
    assert all(same_bits(a, b) for a, b in zip(encoded, expected, strict=True))
    out, expected_out = torch.empty(2, *x.shape, dtype=out_dtype)
    dequantize_vectors(*encoded, codebook, out)
    dequantize_vectors_reference(*expected, codebook, expected_out)
    assert same_bits(out, expected_out)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 130).flatmap(lambda columns: matrices(columns, odd=False)), st.integers(2, 8))
def test_a_vector_takes_the_nearest_level(x, bits):
    codebook = normal_codebook(bits)
    codes, scale = quantize_vectors(x, codebook)
    out = torch.empty(x.shape)
    dequantize_vectors(codes, scale, codebook, out)
    nearest = (codebook * scale.float().unsqueeze(-1)).unsqueeze(1).sub(x.float().unsqueeze(-1)).abs().amin(-1)
    assert ((out - x.float()).abs() <= nearest + scale.float().unsqueeze(-1) * 1e-6).all()


def test_the_normal_codebook_of_4_bits_is_the_one_of_qlora():
    published = """-1.0 -0.6961928 -0.52507305 -0.39491749 -0.28444138 -0.18477343 -0.09105004 0.0
        0.07958030 0.16093020 0.24611230 0.33791524 0.44070983 0.56261700 0.72295684 1.0"""
    torch.testing.assert_close(normal_codebook(4), torch.tensor([float(level) for level in published.split()]))


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 130).flatmap(matrices), st.integers(1, 127), st.data())
def test_steps_equal_reference(x, limit, data):
    sizes = st.sampled_from([0.0, 1e-42, 1e-6, 0.25, 1.0, 77.0, 3e38])
    columns = x.shape[1]
    step = torch.tensor(data.draw(st.lists(sizes, min_size=columns, max_size=columns)))
    symbols = quantize_steps(x, step, limit)
    assert same_bits(symbols, quantize_steps_reference(x, step, limit))
    assert symbols.max() <= 2 * limit
    out, expected = torch.empty(2, *x.shape, dtype=data.draw(st.sampled_from(DTYPES)))
    dequantize_steps(symbols, step, limit, out)
    dequantize_steps_reference(symbols, step, limit, expected)
    assert same_bits(out, expected)


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 130).flatmap(lambda columns: matrices(columns, odd=False)), st.floats(0.1, 2.0), st.integers(1, 127)
)
def test_a_value_within_the_limit_returns_within_half_a_step(x, size, limit):
    step = torch.full((x.shape[1],), size)
    out = torch.empty(x.shape)
    dequantize_steps(quantize_steps(x, step, limit), step, limit, out)
    clamped = x.float().clamp(-limit * step, limit * step)
    assert ((out - clamped).abs() <= step / 2 + clamped.abs() * 1e-6).all()


def test_half_a_step_rounds_to_even_and_a_channel_of_no_step_is_zero():
    x = torch.tensor([[0.5, 1.5, 2.5, -0.5, 9.0, 5.0]])
    step = torch.tensor([1.0, 1.0, 1.0, 1.0, 0.0, 1.0])
    symbols = quantize_steps(x, step, 3)
    assert symbols.tolist() == [[3, 5, 5, 3, 3, 6]]
    out = torch.empty_like(x)
    dequantize_steps(symbols, step, 3, out)
    assert out.tolist() == [[0.0, 2.0, 2.0, 0.0, 0.0, 3.0]]


def test_values_need_not_be_contiguous():
    x = torch.randn(6, 64).bfloat16()
    for a, b in zip(quantize_groups(x.T, 4, 3), quantize_groups(x.T.contiguous(), 4, 3), strict=True):
        assert same_bits(a, b)


X = torch.zeros(4, 64)
STEP = torch.ones(64)
CODEBOOK = normal_codebook(4)


@pytest.mark.parametrize(
    "quantize",
    [
        lambda: quantize_groups(X, 1, 32),
        lambda: quantize_groups(X, 9, 32),
        lambda: quantize_groups(X, 4, 0),
        lambda: quantize_groups(X, 4, 48),
        lambda: quantize_groups(X[0], 4, 32),
        lambda: quantize_groups(X[:0], 4, 32),
        lambda: quantize_groups(X.double(), 4, 32),
        lambda: quantize_vectors(X, CODEBOOK[:15]),
        lambda: quantize_vectors(X, CODEBOOK.flip(0)),
        lambda: quantize_vectors(X, CODEBOOK * 2),
        lambda: quantize_vectors(X, CODEBOOK.double()),
        lambda: quantize_steps(X, STEP, 0),
        lambda: quantize_steps(X, STEP, 128),
        lambda: quantize_steps(X, STEP[1:], 3),
        lambda: quantize_steps(X, -STEP, 3),
        lambda: quantize_steps(X, STEP * float("nan"), 3),
        lambda: quantize_steps(X, STEP / 0, 3),
        lambda: quantize_steps(X, STEP.double(), 3),
        lambda: normal_codebook(9),
    ],
)
def test_what_cannot_be_quantized_is_refused(quantize):
    with pytest.raises(ValueError, match=r"."):
        quantize()


CODES, SCALE, ZERO = quantize_groups_reference(X, 4, 32)
BYTES = torch.zeros(4, 64, dtype=torch.uint8)


@pytest.mark.parametrize(
    "dequantize",
    [
        lambda out: dequantize_groups(CODES[:3], SCALE, ZERO, 4, out),
        lambda out: dequantize_groups(CODES[:, 1:], SCALE, ZERO, 4, out),
        lambda out: dequantize_groups(CODES, SCALE, ZERO, 5, out),
        lambda out: dequantize_groups(CODES, SCALE[:3], ZERO, 4, out),
        lambda out: dequantize_groups(CODES, SCALE, ZERO[:3], 4, out),
        lambda out: dequantize_groups(CODES, SCALE.float(), ZERO, 4, out),
        lambda out: dequantize_groups(CODES, SCALE[0], ZERO[0], 4, out),
        lambda out: dequantize_groups(CODES, SCALE, ZERO, 4, out.T),
        lambda out: dequantize_groups(CODES.to(torch.int16), SCALE, ZERO, 4, out),
        lambda out: dequantize_vectors(CODES[:3], SCALE[:, 0].contiguous(), CODEBOOK, out),
        lambda out: dequantize_vectors(CODES, SCALE[:3, 0].contiguous(), CODEBOOK, out),
        lambda out: dequantize_vectors(CODES, SCALE[:, 0].contiguous(), normal_codebook(5), out),
        lambda out: dequantize_steps(BYTES[:3], STEP, 3, out),
        lambda out: dequantize_steps(BYTES, STEP[1:], 3, out),
        lambda out: dequantize_steps(BYTES, STEP, 128, out),
        lambda out: dequantize_steps(BYTES.T, STEP, 3, out),
        lambda out: dequantize_steps(BYTES, STEP, 3, out[:, ::2]),
        lambda out: dequantize_steps(BYTES, STEP, 3, out.view(64, 4).T),
        lambda out: dequantize_groups(CODES, SCALE, ZERO, 4, out.view(64, 4).T),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(dequantize):
    out = torch.full((4, 64), 7.0)
    with pytest.raises(ValueError, match=r"."):
        dequantize(out)
    assert (out == 7.0).all()
