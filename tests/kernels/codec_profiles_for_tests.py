"""Profiles of a small shape: measured on nobody, but with everything that a measured one can have."""

import numpy as np

from kernels.codecs import CodecProfile
from kernels.codecs.profile import ANCHOR_FACTOR, HalfProfile
from kernels.codecs.step_plan import histogram, normal_histogram, plan_for

MODEL = b"a model's weight"


def half_profile(channels, factors, anchors, seed=0, spread=1.0):
    """``spread``: of what is coded in steps, in units of a channel's deviation."""
    random = np.random.default_rng(seed)
    counts = normal_histogram() if spread == 1.0 else histogram(spread * random.normal(size=100_000))
    mean = random.normal(size=channels).astype(np.float16).astype(np.float32)
    deviation = random.uniform(0.5, 2, channels).astype(np.float16).astype(np.float32)
    return HalfProfile(
        tuple(plan_for(counts, factor)[0] for factor in factors),
        plan_for(normal_histogram(), ANCHOR_FACTOR)[0] if anchors else None,
        mean,
        deviation,
    )


def small_profile(layers=2, heads=2, dim=8, factors=(0.25, 0.5, 1.0), anchors=(False, True), spread=1.0):
    halves = tuple(
        tuple(half_profile(heads * dim, factors, anchors[half], 2 * layer + half, spread) for half in range(2))
        for layer in range(layers)
    )
    return CodecProfile((layers, heads, dim), MODEL, halves)
