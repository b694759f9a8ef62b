"""When a plan does what is not expected to be best, to measure it.

A way that is never taken is never measured, so that it has become the better one would go unnoticed:

* A *tier* that does not pay is not loaded from. A probe loads one segment of it.
* *Computing* what is loaded from a tier that does pay. A probe loads nothing. Only where computing is expected to take
  less than `NEAR` times as long: what is known of it would have to be very wrong otherwise, and the prompt pays for it.
  What an extension brings counts as such a load: what it computes is no sample of a prefill.
  Not more than one of `COMPUTING_PLANS` plans, for where both are as good the tier is to be measured too.

Every plan that goes without saves up `PROBE_SHARE` of its expected time, and a probe is due when its expected loss is
saved. So probing costs little on average, what is nearly worth it is probed often, and what is hopeless rarely. A
tier's probe is due too, however dear it is, when the tier has not been measured for `PROBE_AGE_S` and `PROBE_PLANS`
plans have left it out: it may have been repaired.

Expected times are of the prompt itself, without what it waits for others: else a long queue would make computing look
as good as loading, and pay for its probe. Times are seconds on any clock that does not jump. One thread.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from kvmanager.index.locations import Tier

PROBE_SHARE = 0.05
PROBE_AGE_S = 30.0
PROBE_PLANS = 16
COMPUTING_PLANS = 8
NEAR = 2.0


@dataclass(slots=True)
class _Without:
    """Plans of one replica since the last probe, and what they have saved up for the next."""

    saved_s: float = 0.0
    plans: int = 0
    probed_at: float = -inf

    def add(self, expected_s: float) -> None:
        self.plans += 1
        self.saved_s += PROBE_SHARE * expected_s


class Probes:
    """See the module's docstring."""

    def __init__(self) -> None:
        self._without_tier: dict[tuple[str, Tier], _Without] = {}
        self._without_computing: dict[str, _Without] = {}

    def tier_is_due(
        self, replica: str, tier: Tier, now: float, expected_s: float, loss_s: float, measured_at: float
    ) -> bool:
        """Note a plan that leaves a tier out; return whether it should probe that tier.

        ``expected_s``: of the plan, after the queue; ``loss_s``: what a probe adds to that; ``measured_at``: when a
        load from the tier was reported last.
        """
        without = self._without_tier.setdefault((replica, tier), _Without())
        without.add(expected_s)
        old = now - max(without.probed_at, measured_at) >= PROBE_AGE_S and without.plans >= PROBE_PLANS
        if not old and without.saved_s < loss_s:
            return False
        self._without_tier[replica, tier] = _Without(probed_at=now)
        return True

    def computing_is_due(self, replica: str, load_s: float, recompute_s: float) -> bool:
        """Note a plan that loads all that is stored; return whether it should load nothing instead.

        Both times are after the queue.
        """
        if recompute_s >= NEAR * load_s:
            return False
        without = self._without_computing.setdefault(replica, _Without())
        without.add(load_s)
        if without.plans < COMPUTING_PLANS or without.saved_s < recompute_s - load_s:
            return False
        del self._without_computing[replica]
        return True

    def forget_replica(self, replica: str) -> None:
        """Note that a replica is gone."""
        self._without_computing.pop(replica, None)
        self._without_tier = {key: without for key, without in self._without_tier.items() if key[0] != replica}
