"""What the manager tells people: where a prompt lies, the books, who is registered.

On the manager's event loop.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from deployments.manager.directive_sender import DirectiveSender
from deployments.manager.replica_seat import ReplicaSeat, names_by_rank
from deployments.manager.tier_registry import TierRegistry
from kvmanager.loading.load_choice import LoadChoice
from kvmanager.loading.load_rates import ALL_REPLICAS
from kvmanager.manager import KVManager
from kvmanager.scaling.book import ScalingBook
from kvmanager.segments.keys import BlockHash


class Reports:
    """See the module's docstring. `replicas` are the registered ones, `ended` counts those that ended, by why."""

    def __init__(
        self,
        brain: KVManager,
        replicas: Mapping[str, ReplicaSeat],
        ended: Mapping[str, int],
        loads: LoadChoice,
        directives: DirectiveSender,
        tiers: TierRegistry,
    ) -> None:
        self._brain = brain
        self._replicas = replicas
        self._ended = ended
        self._loads = loads
        self._directives = directives
        self._tiers = tiers
        self.scaling = ScalingBook()

    def lookup(self, hashes: Sequence[BlockHash]) -> dict[str, Any]:
        """Where the leading blocks of a prompt lie. Replicas are named by rank."""
        found = self._brain.lookup(hashes)
        found["device"] = {
            str(rank): found["device"][replica]
            for rank, replica in sorted(names_by_rank(self._replicas).items())
            if replica in found["device"]
        }
        return found

    async def stats(self) -> dict[str, Any]:
        """The brain's books, and every tier's own count beside them."""
        stats = self._brain.stats(time.monotonic())
        stats["replicas"] = {str(rank): name for rank, name in sorted(names_by_rank(self._replicas).items())}
        stats["replicas_ended"] = dict(self._ended)
        stats["credits"] = self._loads.credits(time.monotonic()).get(ALL_REPLICAS, {})
        stats["load_or_recompute"] = self._loads.describe()
        stats["directives"] = self._directives.report()
        stats["scaling"] = self.scaling.report(time.monotonic())
        stats["cpu_tiers"], stats["redis"] = await self._tiers.stats()
        return stats

    def parts(self) -> dict[str, Any]:
        """Who is registered, for /health: each replica's rank and the seconds since it last reported, and tiers."""
        now = time.monotonic()
        return {
            "replicas": {name: (seat.rank, now - seat.last_seen) for name, seat in self._replicas.items()},
            "cpu_tiers": sorted(self._tiers.cpu),
            "redis": self._tiers.redis_report(),
            "scaling": self.scaling.report(now),
        }
