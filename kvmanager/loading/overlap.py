"""Which way of loading hides more: layer by layer under the computation of the rest of the prompt, or the whole prefix
while other requests are computed.

* *Layerwise*: the engine's step computes the rest of the prompt, and before each layer waits for that layer of the
  prefix. Loading hides behind computing, but the step, with all requests in it, stands still for what does not.
* *Whole*: the prefix is loaded first, without the engine, and the rest of the prompt computed after it. Nothing hides,
  and no other request waits.

With ``g`` groups of layers that arrive at even intervals and are computed one after the other, group ``i`` (from 0)
arrives at ``first + i (load - first) / (g - 1)`` and takes ``compute / g``, so the computation ends at
``max(first + compute, load + compute / g)``: both terms are linear in ``i``, so the first or the last group decides.

Pure: no clock, any thread.
"""

from dataclasses import dataclass
from enum import StrEnum

NEGLIGIBLE_WAIT_S = 0.002
"""How long a step may stand still although other requests are in it: less than the smallest model's decode step."""
ARRIVALS = 0.25
"""Weight of an arrival that may have to wait for a step that stands still: the gain must be this share of the wait."""
ASYNC_S = 0.002
"""Cost of loading the whole prefix, in addition to the load: one more step to schedule, and the wait for its turn."""


class LoadWay(StrEnum):
    """How a request's prefix is loaded."""

    LAYERWISE = "layerwise"
    WHOLE = "whole"


@dataclass(frozen=True, slots=True)
class Overlap:
    """A choice, and the time to the first token that is expected of it.

    ``wait_s`` is how long the engine's step is expected to stand still; 0 for the whole prefix.
    """

    way: LoadWay
    ttft_s: float
    wait_s: float


def choose_way(
    *,
    first_group_s: float,
    load_s: float,
    compute_s: float,
    groups: int,
    others: int,
    group_bytes: int,
    buffer_bytes: int,
) -> Overlap:
    """Choose how to load a prefix.

    ``first_group_s`` and ``load_s``: until the first and the last group of layers have arrived; ``compute_s``: the
    engine's time for what the step computes of the rest of the prompt. ``others``: requests that are in the engine's
    steps already. ``group_bytes``: the largest group of layers of the whole prefix; one that the ``buffer_bytes`` left
    do not hold cannot be loaded layerwise.
    """
    layerwise_s = layerwise_ttft(first_group_s, load_s, compute_s, groups)
    whole_s = load_s + compute_s + ASYNC_S
    wait_s = layerwise_s - compute_s
    others_wait = others > 0 and wait_s > NEGLIGIBLE_WAIT_S
    pays = whole_s - layerwise_s >= ARRIVALS * max(0.0, wait_s - NEGLIGIBLE_WAIT_S)
    if group_bytes > buffer_bytes or others_wait or not pays:
        return Overlap(LoadWay.WHOLE, whole_s, 0.0)
    return Overlap(LoadWay.LAYERWISE, layerwise_s, wait_s)


def layerwise_ttft(first_group_s: float, load_s: float, compute_s: float, groups: int) -> float:
    """Return when the computation of all layers ends (module docstring); ``groups`` is 1 at least."""
    return max(first_group_s + compute_s, load_s + compute_s / groups)
