"""Shifting keys: the compiled version gives the reference's bits, and a shifted key is the one rotated elsewhere."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.rope.reference import shift_keys_reference
from kernels.rope.shift import rotation, shift_keys

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
STYLES = ("neox", "gptj")


def same_bits(a, b):
    """Equal as bytes: comparing floats would call -0.0 the same as 0.0."""
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


def frequencies(rotary_dim, theta=10_000.0):
    return theta ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim)


@st.composite
def shifts(draw):
    """(keys, delta, inv_freq)."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    head_dim = draw(st.sampled_from([2, 6, 32, 64, 80, 128]))
    rotary_dim = 2 * draw(st.integers(1, head_dim // 2))
    tokens = draw(st.integers(1, 6))
    k = torch.randn(tokens, draw(st.integers(1, 3)), head_dim, generator=generator).to(draw(st.sampled_from(DTYPES)))
    deltas = st.sampled_from([0, 1, -1, 17, -500, 131_072, 2**31])
    if draw(st.booleans()):
        return k, draw(deltas), frequencies(rotary_dim)
    return k, torch.tensor(draw(st.lists(deltas, min_size=tokens, max_size=tokens))), frequencies(rotary_dim)


@settings(max_examples=100)
@given(shifts(), st.sampled_from(STYLES), st.booleans())
def test_shift_equals_reference(case, style, in_place):
    k, delta, inv_freq = case
    expected, before = torch.empty_like(k), k.clone()
    shift_keys_reference(k, rotation(delta, inv_freq, len(k)), style, expected)
    if in_place:
        shift_keys(k, delta, inv_freq, style)
        assert same_bits(k, expected)
    else:
        out = torch.empty_like(k)
        shift_keys(k, delta, inv_freq, style, out)
        assert same_bits(out, expected)
        assert same_bits(k, before)


def rotated(k, positions, inv_freq, style):
    """``k`` at ``positions`` by transformers' rotary arithmetic, in float32."""
    angles = positions.double().unsqueeze(1) * inv_freq.double()
    if style == "neox":
        from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

        cos, sin = (torch.cat((half, half), dim=-1).float() for half in (angles.cos(), angles.sin()))
        return apply_rotary_pos_emb(k.unsqueeze(0), k.unsqueeze(0), cos, sin, unsqueeze_dim=1)[1].squeeze(0)
    from transformers.models.gptj.modeling_gptj import apply_rotary_pos_emb

    cos, sin = angles.cos().float().unsqueeze(0), angles.sin().float().unsqueeze(0)
    return apply_rotary_pos_emb(k.unsqueeze(0), sin, cos).squeeze(0)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("delta", [1, -30, 4096, 1_000_000, torch.tensor([5, -5, 0, 70_000, 12, 1, 1, -1])])
def test_a_shifted_key_is_the_key_rotated_at_the_other_position(style, delta):
    k = torch.randn(8, 2, 64, generator=torch.Generator().manual_seed(1))
    positions, inv_freq = torch.arange(100, 108), frequencies(64, theta=1e6)
    shifted = rotated(k, positions, inv_freq, style)
    shift_keys(shifted, delta, inv_freq, style)
    torch.testing.assert_close(shifted, rotated(k, positions + delta, inv_freq, style), atol=2e-6, rtol=0)


@pytest.mark.parametrize("style", STYLES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("delta", [0, torch.zeros(3, dtype=torch.int64)], ids=["all", "each"])
def test_a_shift_by_nothing_keeps_every_bit(style, dtype, delta):
    k = torch.randn(3, 2, 64).to(dtype)
    k[0, 0, :4] = torch.tensor([float("nan"), -0.0, float("inf"), -0.0])
    before, out = k.clone(), torch.empty_like(k)
    shift_keys(k, delta, frequencies(64), style, out)
    shift_keys(k, delta, frequencies(64), style)
    assert same_bits(k, before)
    assert same_bits(out, before)


@settings(max_examples=40)
@given(shifts(), st.sampled_from(STYLES))
def test_a_shift_and_its_reverse_return_the_keys_within_their_rounding(case, style):
    k, delta, inv_freq = case
    returned = k.clone()
    shift_keys(returned, delta, inv_freq, style)
    shift_keys(returned, -delta, inv_freq, style)
    largest = k.float().abs().amax()
    assert (returned.float() - k.float()).abs().amax() <= 4 * torch.finfo(k.dtype).eps * largest + 1e-7


@pytest.mark.parametrize("style", STYLES)
def test_dimensions_beyond_the_rotary_ones_stay(style):
    k = torch.randn(3, 2, 64).bfloat16()
    out = torch.empty_like(k)
    shift_keys(k, 9, frequencies(48), style, out)
    assert same_bits(out[..., 48:], k[..., 48:])
    assert not torch.equal(out[..., :48], k[..., :48])


K = torch.zeros(4, 2, 64)
FREQUENCIES = frequencies(64)


@pytest.mark.parametrize(
    "shift",
    [
        lambda out: shift_keys(K[0], 1, FREQUENCIES, "neox", out),
        lambda out: shift_keys(K.double(), 1, FREQUENCIES, "neox", out),
        lambda out: shift_keys(K.transpose(0, 1), 1, FREQUENCIES, "neox", out),
        lambda out: shift_keys(K[:3], 1, FREQUENCIES, "neox", out),
        lambda out: shift_keys(K.bfloat16(), 1, FREQUENCIES, "neox", out),
        lambda out: shift_keys(K, 1, frequencies(66), "neox", out),
        lambda out: shift_keys(K, 1, FREQUENCIES[:0], "neox", out),
        lambda out: shift_keys(K, 1, FREQUENCIES.double(), "neox", out),
        lambda out: shift_keys(K, 1, FREQUENCIES, "llama", out),
        lambda out: shift_keys(K, torch.ones(3, dtype=torch.int64), FREQUENCIES, "neox", out),
        lambda out: shift_keys(K, torch.ones(4), FREQUENCIES, "neox", out),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_is_written(shift):
    out = torch.full((4, 2, 64), 7.0)
    with pytest.raises(ValueError, match=r"."):
        shift(out)
    assert (out == 7.0).all()
