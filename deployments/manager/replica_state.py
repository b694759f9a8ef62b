"""A replica as the KV manager sees it: identified by its unique name; its rank is only a label for people.

Serve reassigns ranks when replicas come and go, and for a while two replicas may report the same one: a draining
replica and its replacement, or one that has not heard yet that it was renumbered. So a rank decides nothing but which
replica a number in a request means.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from kvmanager.moves.directives import DeviceDirective
from kvmanager.scheduling.rebalancing import KVReport

logger = logging.getLogger(__name__)

SILENCE_S = 30.0
"""A replica that has not polled for this long is forgotten, with all it had on its device."""
MISSED_POLLS_S = 10.0
"""A replica polls every 2 s (`deployments.replica.manager_link`). One that has missed them for this long and whose rank
another replica reports is gone: its successor need not wait until it is forgotten for its silence alone."""


class QueuedDirective(NamedTuple):
    """A directive that waits for its replica's poll."""

    number: int
    directive: DeviceDirective
    until: float
    """On the manager's clock, when it is void; infinite: never."""


@dataclass(slots=True)
class ReplicaState:
    """A registered replica: `rank` is what it last said its number is, `directives` what it has to do."""

    rank: int
    node_id: str
    last_seen: float
    directives: asyncio.Queue[QueuedDirective] = field(default_factory=asyncio.Queue)
    drains: bool = False
    """Serve sends it nothing more: it ends when it has answered what it has."""
    apart: str = ""
    """Why it shares no KV, though others do."""
    kv: KVReport | None = None
    """Its last report of its device pool."""

    async def take(self, wait_s: float) -> list[QueuedDirective]:
        """Wait for its directives and return them; empty: none in time."""
        taken: list[QueuedDirective] = []
        with contextlib.suppress(TimeoutError):
            taken.append(await asyncio.wait_for(self.directives.get(), wait_s))
            while not self.directives.empty():
                taken.append(self.directives.get_nowait())
        return taken


def names_by_rank(replicas: Mapping[str, ReplicaState]) -> dict[int, str]:
    """The name that a rank means: of several replicas that report it, the one that was heard of last."""
    return {state.rank: name for name, state in sorted(replicas.items(), key=lambda item: item[1].last_seen)}


def succeeded_by(replicas: Mapping[str, ReplicaState], replica: str, rank: int, now: float) -> list[str]:
    """The silent replicas whose rank `replica` has now. Never one that polled lately: that one lives."""
    return [
        name
        for name, state in replicas.items()
        if name != replica and state.rank == rank and now - state.last_seen > MISSED_POLLS_S
    ]


def silent(replicas: Mapping[str, ReplicaState], now: float) -> list[str]:
    """Those that are to be forgotten; says so in the log."""
    names = [name for name, state in replicas.items() if now - state.last_seen > SILENCE_S]
    for name in names:
        logger.warning("replica %s (rank %d) is silent and forgotten", name, replicas[name].rank)
    return names


def warn_of_another_model(replica: str, fingerprint: bytes, before: bytes | None) -> None:
    """Say in the log that a replica computes otherwise than those `before` it, if it does."""
    if before is not None and fingerprint != before:
        logger.warning(
            "replica %s computes otherwise than those before it (other model files, vLLM, machine or environment): "
            "KV is not exchanged between them; give all nodes the same",
            replica,
        )
