"""What a codec gives back, how many bytes it takes, and what it refuses."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from codec_profiles_for_tests import small_profile
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.codecs import CodecError, CodecProfile, lossless, make_codec, steps_cpu
from kernels.codecs.steps_cpu import quantize, statistics
from kernels.dtypes import BFLOAT16, array_of, bits_of

DTYPES = (torch.bfloat16, torch.float16, torch.float32)

PROFILE = small_profile()
GENERIC = CodecProfile.generic((2, 2, 8))
LOSSY = [("cachegen", level, profile) for level in (1, 2, 3) for profile in (PROFILE, GENERIC)]
NAMES = [f"{name}-{level}-{'generic' if profile is GENERIC else 'own'}" for name, level, profile in LOSSY]


def layer_of(profile, layer, tokens, dtype=torch.bfloat16, seed=0):
    """Values as this layer of the profile expects them."""
    generator = torch.Generator().manual_seed(seed)
    _, heads, dim = profile.shape
    kv = torch.randn((2, tokens, heads * dim), generator=generator)
    for half, of_half in enumerate(profile.halves[layer]):
        if not profile.is_generic:
            kv[half] = kv[half] * torch.from_numpy(of_half.deviation) + torch.from_numpy(of_half.mean)
    return kv.view(2, tokens, heads, dim).to(dtype)


def through(codec, layer, kv):
    array = array_of(kv)
    coded = codec.encode(layer, array)
    assert coded.dtype == np.uint8
    assert len(coded) <= codec.bound(array.shape, array.dtype)
    out = torch.full_like(kv, 7.0)
    codec.decode(layer, coded.tobytes(), array_of(out))
    return coded, out


@settings(max_examples=60)
@given(
    st.sampled_from([(2, 1), (2, 3), (1, 1)]),
    st.integers(1, 40),
    st.integers(1, 20),
    st.sampled_from(DTYPES),
    st.integers(0, 2**31),
)
def test_lossless_gives_back_every_bit_of_any_bits(halves_and_heads, tokens, dim, dtype, seed):
    """Of keys and values, and of latents, which are one half."""
    random = np.random.default_rng(seed)
    halves, heads = halves_and_heads
    kv = torch.empty((halves, tokens, heads, dim), dtype=dtype)
    # From few different exponents to all of them, NaNs and infinities among them.
    ones = random.integers(0, 2**32, kv.numel(), dtype=np.uint64) & random.integers(0, 2**32, dtype=np.uint64)
    bits = bits_of(array_of(kv))
    bits[:] = ones.astype(bits.dtype)
    _, out = through(make_codec("lossless"), 0, kv)
    assert np.array_equal(bits_of(array_of(out)), bits)


@pytest.mark.parametrize(("dtype", "least"), [(torch.bfloat16, 1.4), (torch.float16, 1.1), (torch.float32, 1.15)])
def test_lossless_makes_values_of_few_binades_smaller(dtype, least):
    kv = torch.randn((2, 256, 2, 64), generator=torch.Generator().manual_seed(1)).to(dtype)
    coded, _ = through(make_codec("lossless"), 0, kv)
    assert kv.nbytes / len(coded) > least


def test_a_lossy_codec_refuses_latents():
    with pytest.raises(ValueError, match="a layer is \\(2, tokens"):
        make_codec("cachegen", 1, GENERIC).encode(0, array_of(torch.zeros(1, 32, 1, 16)))


@pytest.mark.parametrize("dtype", DTYPES)
def test_lossless_stores_what_cannot_be_coded_as_it_is(dtype):
    kv = torch.empty((2, 32, 2, 64), dtype=dtype)
    bits = bits_of(array_of(kv))
    bits[:] = np.random.default_rng(2).integers(0, 2**32, bits.size, dtype=np.uint64).astype(bits.dtype)
    coded, _ = through(make_codec("lossless"), 0, kv)
    assert kv.nbytes < len(coded) <= kv.nbytes + 16


@settings(max_examples=40)
@given(st.integers(1, 45), st.sampled_from(DTYPES), st.sampled_from(LOSSY), st.integers(0, 1), st.integers(0, 999))
def test_a_lossy_codec_is_off_by_half_a_step_and_the_dtypes_rounding_at_most(tokens, dtype, codec, layer, seed):
    name, level, profile = codec
    kv = layer_of(profile or PROFILE, layer, tokens, dtype, seed)
    _, out = through(make_codec(name, level, profile), layer, kv)
    for half in range(2):
        x, y = kv[half].float().flatten(1), out[half].float().flatten(1)
        if name == "cachegen":
            of_half = profile.halves[layer][half]
            deviation = torch.from_numpy(of_half.deviation) if len(of_half.deviation) else x.std(0, correction=0)
            most = 0.5 * of_half.plans[level - 1].factor * deviation * 1.002 + 1e-3
        else:
            vectors = kv[half].float()
            spread = vectors.amax(-1, keepdim=True) - vectors.amin(-1, keepdim=True)
            most = (0.502 * spread / 255).expand_as(vectors).flatten(1) + 2e-3
        rounding = y.abs() * 2.0**-8 + x.abs() * 2.0**-8
        assert bool(((x - y).abs() <= most + rounding).all())


@pytest.mark.parametrize("profile", [PROFILE, GENERIC], ids=["own", "generic"])
@pytest.mark.parametrize("level", [1, 2, 3])
@pytest.mark.parametrize("dtype", DTYPES)
def test_values_far_outside_come_back_exactly(profile, level, dtype):
    kv = layer_of(profile, 1, 64, dtype)
    kv[0, 5, 0, 3] = 1.5e4
    kv[1, 20, 1, 7] = -3e4  # an anchor, in the profile that has them
    kv[1, 27, 1, 6] = -3e4
    _, out = through(make_codec("cachegen", level, profile), 1, kv)
    for place in ((0, 5, 0, 3), (1, 20, 1, 7), (1, 27, 1, 6)):
        assert out[place] == kv[place]


@pytest.mark.parametrize(("name", "level", "profile"), LOSSY, ids=NAMES)
def test_not_a_number_and_infinity_do_no_harm_to_other_values(name, level, profile):
    kv = layer_of(profile or PROFILE, 0, 30)
    kv[0, 3, 0, 1], kv[1, 4, 1, 2] = float("nan"), float("inf")
    _, out = through(make_codec(name, level, profile), 0, kv)
    assert bool((out[0, 10, 0, 3:] - kv[0, 10, 0, 3:]).abs().max() < 1.5)


@pytest.mark.parametrize("every", [0, 10])
@pytest.mark.parametrize("dtype", DTYPES)
def test_symbols_count_steps_from_the_base_and_escapes_come_in_order(dtype, every):
    generator = torch.Generator().manual_seed(5)
    x = torch.randn((41, 24), generator=generator).mul(3).to(dtype)
    x.view(-1)[::37], x.view(-1)[5::41] = float("nan"), float("-inf")
    step = torch.rand(24, generator=generator) + 0.01
    base = torch.randn((5 if every else 1, 24), generator=generator)
    symbols, escaped = quantize(array_of(x), step.numpy(), base.numpy(), every, 4)
    coded = torch.tensor([token for token in range(41) if not every or token % every])
    rows = base[coded // every if every else torch.zeros_like(coded)]
    steps = ((x[coded].float() - rows) * (1 / step)).nan_to_num(nan=0.0)
    expected = (steps.clamp(-4, 4).round() + 4).to(torch.uint8).numpy()
    assert np.array_equal(symbols, expected)
    assert np.array_equal(
        escaped, bits_of(array_of(x[coded])).reshape(expected.shape)[(expected == 0) | (expected == 8)]
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_statistics_are_the_channels_own_and_within_their_limits(dtype):
    x = torch.randn((256, 6), generator=torch.Generator().manual_seed(6))
    x[:, 1], x[:, 2], x[7, 3], x[8, 4] = x[:, 1] + 300, x[:, 2] * 0, float("inf"), float("nan")
    x = x.to(dtype)
    mean, deviation = statistics(array_of(x), 0.01, 200.0)
    own_deviation, own_mean = torch.std_mean(x.float(), 0, correction=0)
    assert np.allclose(mean, [own_mean[0], 200, 0, 0, 0, own_mean[5]], atol=1e-5)
    assert np.allclose(deviation, [own_deviation[0], own_deviation[1], 0.01, 1, 1, own_deviation[5]], rtol=1e-4)


STORED = {
    ("lossless", 0): "f5e5adda595bcf7e791f5532b1defab7",
    ("cachegen", 1): "4a7ac715cb2dec95fb8a40d864ec78a1",
    ("cachegen", 2): "f281038a57875b3c7c7bf016238e2c8e",
    ("cachegen", 3): "db7d76aeefb6afba6fd99941c531161e",
}
"""SHA-256 of sections as they lie in people's Redis; what differs must have another name."""


@pytest.mark.parametrize(("name", "level"), STORED)
def test_what_is_stored_under_a_name_never_changes(name, level):
    profile = CodecProfile.from_bytes((Path(__file__).parents[2] / "models/demo/kv_profile.dat").read_bytes())
    codec, digest = make_codec(name, level, profile), hashlib.sha256()
    for dtype in DTYPES:
        for tokens in (1, 33, 256):
            random = np.random.Generator(np.random.PCG64(tokens))
            shape = (2, tokens, *profile.shape[1:])
            numbers = random.integers(-(2**20), 2**20, shape).astype(np.float64) * random.integers(1, 100, shape)
            kv = torch.from_numpy((numbers / 2**22).astype(np.float32)).to(dtype)
            if tokens == 33:
                kv.view(-1)[::37], kv.view(-1)[5::41] = float("nan"), float("-inf")
                kv.view(-1)[7::83], kv.view(-1)[9::85] = 3e38, -0.0
            digest.update(codec.encode(0, array_of(kv)).tobytes())
    assert digest.hexdigest()[:32] == STORED[name, level]


def test_levels_take_fewer_bits_from_fine_to_coarse():
    kv = layer_of(PROFILE, 0, 256)
    sizes = [len(make_codec("cachegen", level, PROFILE).encode(0, array_of(kv))) for level in (1, 2, 3)]
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 3


def test_bits_are_within_three_percent_of_the_tables_entropy():
    profile = small_profile(heads=2, dim=64)
    kv = array_of(layer_of(profile, 0, 256))
    for level in (1, 2, 3):
        codec = make_codec("cachegen", level, profile)
        assert 1 <= 8 * len(codec.encode(0, kv)) / codec.symbol_bits(0, kv) < 1.03


def test_anchors_save_bits_where_tokens_resemble_the_one_before():
    plain = small_profile(heads=2, dim=64, anchors=(False, False))
    anchored = small_profile(heads=2, dim=64, anchors=(True, True), spread=0.1)
    kv = layer_of(plain, 0, 256).view(2, 256, -1)
    # Groups of ten equal tokens: every delta is a symbol near zero.
    kv = kv[:, ::10].repeat_interleave(10, 1)[:, :256].reshape(2, 256, 2, 64).contiguous()
    sizes = [len(make_codec("cachegen", 1, profile).encode(0, array_of(kv))) for profile in (plain, anchored)]
    assert sizes[1] < 0.6 * sizes[0]


def test_a_generic_profile_takes_channels_from_the_section_and_says_what_it_is():
    kv = layer_of(PROFILE, 0, 256)
    before = len(make_codec("cachegen", 2, GENERIC).encode(0, array_of(kv)))
    kv[0, :, 0, 0] += 300  # a channel whose mean is far from its values' spread, as biases of keys make them
    codec = make_codec("cachegen", 2, GENERIC)
    coded, out = through(codec, 0, kv)
    assert len(coded) < 1.02 * before
    assert codec.generic
    assert not make_codec("cachegen", 2, PROFILE).generic
    assert codec.profile == GENERIC.digest != PROFILE.digest
    assert float((out[0, :, 0, 0].float() - kv[0, :, 0, 0].float()).abs().max()) < 3


def test_a_section_of_another_layer_profile_or_level_does_not_pass_for_the_right_one():
    kv = array_of(layer_of(PROFILE, 0, 40))
    coded = make_codec("cachegen", 1, PROFILE).encode(0, kv)
    out = np.zeros_like(kv)
    with pytest.raises(CodecError):
        make_codec("cachegen", 3, PROFILE).decode(0, coded, out)


@pytest.mark.parametrize("coded", [b"", b"\x00", b"\x07" * 100, b"\x01\xff\xff\xff\xff\xff\xff" * 9])
@pytest.mark.parametrize(("name", "level", "profile"), [("lossless", 0, None), *LOSSY], ids=["lossless", *NAMES])
def test_bytes_that_no_encoder_wrote_are_refused(name, level, profile, coded):
    with pytest.raises(CodecError):
        make_codec(name, level, profile).decode(0, coded, np.zeros((2, 40, 2, 8), BFLOAT16))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("zip",), "no codec 'zip'"),
        (("cachegen", 0, PROFILE), "levels 1 to 3"),
        (("cachegen", 4, PROFILE), "levels 1 to 3"),
        (("cachegen", 2), "needs a profile"),
        (("int8",), "no codec 'int8'"),
        (("lossless", 1), "no levels"),
    ],
)
def test_unknown_names_and_levels_are_refused_in_a_sentence(arguments, says):
    with pytest.raises(ValueError, match=says):
        make_codec(*arguments)


@pytest.mark.parametrize(
    ("layer", "kv", "says"),
    [
        (0, np.zeros((2, 4, 2, 9), np.float32), "the profile is for"),
        (2, np.zeros((2, 4, 2, 8), np.float32), "layers 0 to 1"),
        (0, np.zeros((2, 2, 4, 8), np.float32).swapaxes(1, 2), "contiguous"),
        (0, np.zeros((2, 4, 2, 8)), "floats"),
        (0, np.zeros((1, 4, 2, 8), np.float32), "a layer is"),
        (0, np.zeros((2, 0, 2, 8), np.float32), "a layer is"),
    ],
)
def test_what_is_no_layer_of_this_model_is_refused(layer, kv, says):
    codec = make_codec("cachegen", 1, PROFILE)
    with pytest.raises(ValueError, match=says):
        codec.encode(layer, kv)
    with pytest.raises(ValueError, match=says):
        codec.decode(layer, b"", kv)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "level", "profile"), [("lossless", 0, None), *LOSSY], ids=["lossless", *NAMES])
def test_a_layer_that_cannot_be_written_to_is_coded_by_the_same_compiled_code(name, level, profile, dtype):
    kv, codec = array_of(layer_of(profile or PROFILE, 0, 40, dtype)), make_codec(name, level, profile)
    coded = codec.encode(0, kv)
    functions = [each for module in (lossless, steps_cpu) for each in vars(module).values()]
    functions = [each for each in functions if hasattr(each, "signatures")]
    before = [each.signatures for each in functions]
    kv.flags.writeable = False
    assert np.array_equal(codec.encode(0, kv), coded)
    assert [each.signatures for each in functions] == before
    assert any(before)
