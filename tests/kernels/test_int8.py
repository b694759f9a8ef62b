"""The compiled 8-bit quantizer gives the reference's bits, and stays within its error bound."""

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kernels.codecs import int8_cpu
from kernels.codecs.int8_reference import dequantize_reference, quantize_reference
from kernels.tensors import array_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
COLUMNS = (1, 3, 8, 31, 32, 33, 64, 80, 128)
ODD_VALUES = (float("nan"), float("inf"), -float("inf"), -0.0, 3e38, -7e4, 1e-7, 1e-42)


def quantize(x):
    """The compiled version, tensors in, tensors out."""
    return tuple(torch.from_numpy(part) for part in int8_cpu.quantize(array_of(x)))


def dequantize(codes, scale, zero, out):
    """See `quantize`."""
    int8_cpu.dequantize(*(array_of(part) for part in (codes, scale, zero, out)))


def same_bits(a, b):
    """Equal as bytes: comparing floats would call -0.0 the same as 0.0."""
    return a.dtype is b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@st.composite
def matrices(draw, odd=True):
    """Normal values of any size around any mean; with ``odd``, what no KV should hold is strewn in."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    x = torch.randn(draw(st.integers(1, 5)), draw(st.sampled_from(COLUMNS)), generator=generator)
    x = x * 10.0 ** draw(st.integers(-6, 3)) + draw(st.sampled_from([0.0, 1.0, -300.0]))
    if odd and draw(st.booleans()):
        x.view(-1)[torch.randint(x.numel(), (4,), generator=generator)] = torch.tensor(
            draw(st.lists(st.sampled_from(ODD_VALUES), min_size=4, max_size=4))
        )
    return x.to(draw(st.sampled_from(DTYPES)))


@settings(max_examples=100)
@given(matrices(), st.sampled_from(DTYPES))
@example(torch.tensor([[-0.0, float("nan"), float("nan")]], dtype=torch.bfloat16), torch.bfloat16)
def test_vectors_equal_the_reference(x, out_dtype):
    encoded, expected = quantize(x), quantize_reference(x)
    assert all(same_bits(a, b) for a, b in zip(encoded, expected, strict=True))
    out, expected_out = torch.empty(2, *x.shape, dtype=out_dtype)
    dequantize(*encoded, out)
    dequantize_reference(*expected, expected_out)
    assert same_bits(out, expected_out)
    assert out.isfinite().all()


@settings(max_examples=50)
@given(matrices(odd=False))
def test_a_value_returns_within_half_a_scale(x):
    codes, scale, zero = quantize(x)
    out = torch.empty(x.shape)
    dequantize(codes, scale, zero, out)
    steps, error = scale.float().unsqueeze(-1), (out - x.float()).abs()
    assert (error <= steps / 2 + x.float().abs().clamp(min=1e-30) * 2e-6 + steps * 2e-5).all()


@settings(max_examples=50)
@given(st.sampled_from(COLUMNS), st.integers(0, 2**32), st.sampled_from(DTYPES))
def test_any_bytes_decode_as_the_reference_decodes_them(columns, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(256, (3, columns), dtype=torch.uint8, generator=generator)
    scale, zero = torch.randint(-(2**15), 2**15, (2, 3), generator=generator).to(torch.int16).view(torch.float16)
    out, expected = torch.empty(2, 3, columns, dtype=dtype)
    dequantize(codes, scale, zero, out)
    dequantize_reference(codes, scale, zero, expected)
    assert torch.equal(out.isnan(), expected.isnan())
    assert same_bits(out.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_scale_or_zero_that_is_no_number_gives_none(dtype):
    nan = torch.tensor([0x7FFF], dtype=torch.int16).view(torch.float16)  # rounding it as a number would make a zero
    codes, one = torch.full((1, 64), 17, dtype=torch.uint8), torch.ones(1, dtype=torch.float16)
    for scale, zero in ((nan, one), (one, nan)):
        out = torch.empty(1, 64, dtype=dtype)
        dequantize(codes, scale, zero, out)
        assert out.isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [0.0, -1.5, 1024.0])
def test_a_constant_vector_returns_exactly(value, dtype):
    x = torch.full((2, 64), value, dtype=dtype)
    codes, scale, zero = quantize(x)
    assert (scale == 0).all()
    out = torch.empty_like(x)
    dequantize(codes, scale, zero, out)
    assert torch.equal(out, x)


def test_nan_counts_as_zero_and_infinity_is_clamped():
    x = torch.tensor([[float("nan")], [float("inf")], [-float("inf")], [1.0]])
    out = torch.empty_like(x)
    dequantize(*quantize(x), out)
    assert out.flatten().tolist() == [0.0, 32768.0, -32768.0, 1.0]
