"""A profile is the same bytes everywhere, is refused when damaged or another model's, and codes as its counts say."""

import numpy as np
import pytest
from codec_profiles_for_tests import MODEL, small_profile

from kernels.codecs import CodecProfile
from kernels.codecs.profile import LEVELS
from kernels.codecs.step_plan import histogram, normal_histogram, plan_for


@pytest.mark.parametrize("profile", [small_profile(), CodecProfile.generic((5, 2, 8))], ids=["measured", "generic"])
def test_bytes_give_the_profile_back(profile):
    again = CodecProfile.from_bytes(profile.to_bytes())
    assert again.to_bytes() == profile.to_bytes()
    assert again.digest == profile.digest
    assert len(again.digest) == 16
    assert (again.shape, again.model, again.is_generic) == (profile.shape, profile.model, profile.is_generic)
    for one, other in zip(again.halves[1], profile.halves[1], strict=True):
        assert np.array_equal(one.mean, other.mean)
        assert np.array_equal(one.deviation, other.deviation)
        assert (one.anchors is None) == (other.anchors is None)
        assert [plan.factor for plan in one.plans] == [plan.factor for plan in other.plans]


def test_every_truncation_and_most_changed_bytes_are_refused_with_a_value_error():
    profile = small_profile(layers=1)
    coded = profile.to_bytes()
    for length in range(len(coded)):
        with pytest.raises(ValueError, match="damaged"):
            CodecProfile.from_bytes(coded[:length])
    with pytest.raises(ValueError, match="damaged"):
        CodecProfile.from_bytes(coded + b"\0")
    random = np.random.default_rng(0)
    for _ in range(1000):
        changed = bytearray(coded)
        changed[random.integers(len(changed))] ^= 1 << random.integers(8)
        try:
            found = CodecProfile.from_bytes(bytes(changed))
        except ValueError as error:
            assert "make profile-codec" in str(error)  # noqa: PT017 - both outcomes are right
        else:
            assert found.digest != profile.digest


def test_a_profile_of_another_shape_or_other_weights_is_refused_in_a_sentence():
    profile = small_profile()
    profile.check((2, 2, 8), MODEL)
    with pytest.raises(ValueError, match="2 layers with 2 KV heads of 8, the model has 3 layers"):
        profile.check((3, 2, 8), MODEL)
    with pytest.raises(ValueError, match="measured on weights"):
        profile.check((2, 2, 8), bytes(16))
    CodecProfile.generic((2, 2, 8)).check((2, 2, 8), MODEL)


def test_a_generic_profile_has_coarser_steps_for_deeper_layers_and_higher_levels():
    profile = CodecProfile.generic((24, 2, 64))
    for level in LEVELS:
        factors = [k.plans[level - 1].factor for k, _ in profile.halves]
        assert factors == sorted(factors)
        assert factors[0] < factors[-1]
    for k, v in profile.halves:
        assert [plan.factor for plan in k.plans] == sorted(plan.factor for plan in v.plans)


def test_a_profile_is_small_beside_a_model():
    assert len(CodecProfile.generic((24, 2, 64)).to_bytes()) < 16_384


@pytest.mark.parametrize("factor", [0.25, 0.5, 1.0, 2.0])
def test_a_plan_takes_about_the_bits_that_its_distribution_has(factor):
    counts = normal_histogram()
    plan, bits = plan_for(counts, factor)
    steps = np.rint(np.random.default_rng(1).normal(size=200_000) / factor)
    share = np.unique(steps, return_counts=True)[1] / len(steps)
    entropy = -(share * np.log2(share)).sum()
    assert entropy < bits < entropy + 0.02
    assert (plan.limit - 0.5) * factor > 3


def test_the_limit_is_where_escapes_would_cost_more_than_slots():
    random = np.random.default_rng(2)
    rare = np.concatenate([random.normal(size=100_000), np.full(3, 40.0)])
    often = np.concatenate([random.normal(size=100_000), random.uniform(-30, 30, 20_000)])
    few, many = (plan_for(histogram(values), 0.5)[0].limit for values in (rare, often))
    assert few < 15
    assert many > 50


def test_a_histogram_counts_everything_and_its_ends_take_what_is_beyond():
    counts = histogram(np.array([0.0, 1e9, -1e9, np.inf, np.nan, 63.999], np.float32))
    assert counts.sum() == 6
    assert counts[0] == 1
    assert counts[-1] == 3
