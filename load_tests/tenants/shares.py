"""What two tenants were served in each window of time, by weight."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from load_tests.tenants.load import Done

WINDOW_S = 60.0
STEP_S = 1.0


def window_ratios(
    served: Mapping[str, Sequence[Done]], weights: Mapping[str, float], began: float, ended: float
) -> list[float]:
    """In each window of `WINDOW_S` between two times: the first tenant's cost ÷ weight over the second's.

    A request counts where it ended. Raises ValueError where no window fits in, or one tenant was not served in one.
    """
    first, second = served
    found = []
    start = began
    while start + WINDOW_S <= ended:
        one, other = (
            sum(_within(done, start, start + WINDOW_S) for done in served[tenant]) / weights.get(tenant, 1.0)
            for tenant in (first, second)
        )
        if not other:
            raise ValueError(f"{second} was not served for {WINDOW_S:.0f} s")
        found.append(one / other)
        start += STEP_S
    if not found:
        raise ValueError(f"no window of {WINDOW_S:.0f} s lies in {ended - began:.0f} s")
    return found


def _within(done: Done, start: float, end: float) -> float:
    return done.cost if start <= done.ended < end else 0.0
