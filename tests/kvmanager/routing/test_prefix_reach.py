import hypothesis.strategies as st
from hypothesis import given

from kvmanager.routing.cost import prefix_reach


@given(st.integers(1, 5), st.integers(0, 30), st.data())
def test_reach_is_the_last_held_end_of_any_closed_set(blocks_per_segment, length, data):
    whole = data.draw(st.integers(0, 8))
    held = {cut * blocks_per_segment for cut in range(1, whole + 1)}
    held |= data.draw(st.sets(st.integers(1, (whole + 1) * blocks_per_segment)))
    found = prefix_reach(range(1, length + 1), blocks_per_segment, held.__contains__)
    assert found == max((end for end in held if end <= length), default=0)


def test_a_long_prompt_needs_few_looks():
    looks = []
    prefix_reach(range(100_000), 8, lambda block: bool(looks.append(block)))
    assert len(looks) < 30
