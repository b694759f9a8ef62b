"""The replicas that have just failed a request: a dead engine answers at once, and so looks idle to a router.

The ingress notes, the router reads, on one event loop. Serve replaces a replica that does not recover, under another
name.
"""

from __future__ import annotations

import time
from collections.abc import Callable

KEEP_S = 10.0
"""Serve asks a replica for its health every 2 s and replaces it when that fails three times."""


class FailedReplicas:
    """Names of replicas, each remembered for `keep_s` after its last failure."""

    def __init__(self, keep_s: float = KEEP_S, clock: Callable[[], float] = time.monotonic) -> None:
        self._keep_s = keep_s
        self._clock = clock
        self._failed_at: dict[str, float] = {}

    def note(self, replica: str) -> None:
        """A request failed there because the replica, or its engine, is gone."""
        now = self._clock()
        self._failed_at = {name: at for name, at in self._failed_at.items() if now - at < self._keep_s} | {replica: now}

    def __contains__(self, replica: object) -> bool:
        """Whether it failed a moment ago."""
        at = self._failed_at.get(replica)  # type: ignore[call-overload]  # what is no name was never noted
        return at is not None and self._clock() - at < self._keep_s
