"""CacheGen's profile for what budgets keep: a level's bits are spent on the elements that are stored at all.

A profile for dense KV spends most bits on the layers that lose most by coarse steps. Just these layers are kept whole,
so on sparse KV it takes more per element than its level says, and less is gained than the two would multiply to.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kernels.codecs.profile import LEVELS, CodecProfile
from kvmanager.extensions.sparse.budgets import Budgets
from load_tests.codec.model import kv_shape
from load_tests.codec.profile_measure import (
    BITS,
    Probe,
    Sample,
    assemble,
    distributions,
    level_factors,
    sensitivities,
)


def kept_profile(
    model: Any, samples: Sequence[Sample], probed: int, name: bytes, budgets: Budgets, tick: Callable[[], None]
) -> CodecProfile:
    """Measured as `load_tests.codec.profile.make_profile` does; `name` is the model's digest."""
    _, *heads = kv_shape(model)
    found = distributions(model, samples, tick)
    sensitivity = sensitivities(Probe(model, samples[:probed], found), found, tick)
    kept = [float(share) for share in budgets.shares]
    chosen = {level: level_factors(found, sensitivity, BITS[level], kept) for level in LEVELS}
    return assemble(found, chosen, name, (heads[0], heads[1]))
