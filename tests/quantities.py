"""Numbers that mean something: seconds, rates, shares. A float of 5e-324 is none; its product with another is zero."""

from __future__ import annotations

from hypothesis import strategies as st

LEAST = 1e-6


def up_to(most: float, least: float = LEAST) -> st.SearchStrategy[float]:
    """Zero, or from `least` to `most`."""
    return st.just(0.0) | st.floats(least, most)


def around(low: float, high: float, least: float = LEAST) -> st.SearchStrategy[float]:
    """From `low`, which is below zero, to `high`, without what is nearer to zero than `least`."""
    return st.just(0.0) | st.floats(low, -least) | st.floats(least, high)
