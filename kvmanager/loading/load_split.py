"""How many leading tokens of a prompt to load, and how many to compute: where its first token is expected soonest.

``ttft(n) = max(queue, load of the first n parts) + prefill of all tokens after them``

A load goes on while the prompt waits for others' prefill, so what hides behind that costs nothing. It goes through the
parts in order and the tiers' shares of its time add up, as they were measured (`kvmanager.loading.load_rates`); on a
tier that others are loading from it waits for their bytes first. What is on the device is neither loaded nor computed.

All numbers of parts are tried: one pass over them. With constant rates either nothing or everything pays (tokens that
come later cost more attention); what lies between are tiers of different speed, a load that hides behind the queue, and
a deadline. Of equals the longer load wins: computing delays those behind, loading does not. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import inf
from typing import NamedTuple

from kvmanager.index.locations import Tier
from kvmanager.loading.load_rates import LinearTime, PrefillTime


class StoredPart(NamedTuple):
    """A stored part of a prompt, which begins where the one before it ends: its end, its tier, and its size there."""

    end_token: int
    tier: Tier
    nbytes: int


class Split(NamedTuple):
    """The number of leading parts to load, those on the device included, and the times expected for them."""

    parts: int
    seconds: float
    """Until the first token."""
    recompute_s: float
    """Until the first token if nothing were loaded."""


def best_split(
    parts: Sequence[StoredPart],
    prompt_tokens: int,
    device_tokens: int,
    prefill: PrefillTime,
    tiers: Mapping[Tier, LinearTime],
    ahead: Mapping[Tier, float] | None = None,
    queue_s: float = 0.0,
    most_load_s: float = inf,
) -> Split:
    """Return the split of least expected time. The last of ``prompt_tokens`` is always computed.

    ``device_tokens``: leading tokens on the device; ``ahead``: bytes on their way from a tier already; ``queue_s``:
    prefill that the prompt has to wait for. A load ends before a part of a tier that ``tiers`` does not have, and
    before ``most_load_s``. O(parts).
    """
    taken = 0
    while taken < len(parts) and parts[taken].end_token <= device_tokens:
        taken += 1
    recompute_s = queue_s + _rest_s(prefill, prompt_tokens, device_tokens)
    best, least_s = taken, recompute_s
    for number, load_s in enumerate(load_times(parts[taken:], tiers, ahead), start=taken + 1):
        if load_s > most_load_s:
            break
        seconds = max(queue_s, load_s) + _rest_s(prefill, prompt_tokens, parts[number - 1].end_token)
        if seconds <= least_s:
            best, least_s = number, seconds
    return Split(best, least_s, recompute_s)


def load_times(
    parts: Sequence[StoredPart], tiers: Mapping[Tier, LinearTime], ahead: Mapping[Tier, float] | None = None
) -> list[float]:
    """Return the seconds until each part is there, in order, up to the first part whose tier is not known."""
    times: list[float] = []
    seconds = 0.0
    asked: set[Tier] = set()
    for _, tier, nbytes in parts:
        time = tiers.get(tier)
        if time is None:
            break
        if tier not in asked:
            asked.add(tier)
            seconds += time.seconds((ahead or {}).get(tier, 0.0))
        seconds += nbytes / time.per_s
        times.append(seconds)
    return times


def _rest_s(prefill: PrefillTime, prompt_tokens: int, covered: int) -> float:
    covered = max(0, min(covered, prompt_tokens - 1))
    return prefill.seconds(prompt_tokens - covered, covered)
