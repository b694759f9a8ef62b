import math

import hypothesis.strategies as st
import pytest
from hypothesis import given

from kvmanager.extensions.blend.chunks import RATIO_STEPS, blend_variant, ratio_step
from kvmanager.segments.keys import cache_salt
from kvmanager.segments.server_secret import ServerSecret

SECRET = ServerSecret(bytes(range(32)))
GOLDEN = {0.0: "bac34bebf77ecb2b", 0.15: "2af3299c65434a45", 1.0: "71edfdad5faaabb5"}
"""How the salts of blends begin in stores of earlier versions, by ratio."""


@pytest.mark.parametrize("ratio", GOLDEN)
def test_the_salt_of_a_blend_is_the_one_of_earlier_versions(ratio):
    salt = cache_salt(SECRET, bytes(32), "tenant", "blended", blend_variant(ratio))
    assert salt.startswith(GOLDEN[ratio])


@given(st.floats(0, 1), st.floats(0, 1))
def test_a_blend_is_named_by_its_ratio_and_shares_a_name_with_none_that_is_far_off(one, other):
    ends = {0.0, 1.0}
    if abs(one - other) > 1.5 / RATIO_STEPS or (one != other and ends & {one, other}):
        assert ratio_step(one) != ratio_step(other)
    if ratio_step(one) != ratio_step(other):
        assert len({cache_salt(SECRET, b"m", "acme", "blended", blend_variant(ratio)) for ratio in (one, other)}) == 2


@pytest.mark.parametrize("ratio", [1.1, -0.1, math.nan])
def test_what_is_no_share_names_no_blend(ratio):
    with pytest.raises(ValueError, match="ratio"):
        blend_variant(ratio)
