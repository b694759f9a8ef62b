"""Moves streams away from replicas that are short of KV (`routing.rebalance_streams`), as an administrator could.

Which, and where to, is `kvmanager.scheduling.rebalancing`'s to say. Replicas report their device pools to the manager
with every poll for directives. The ingress, which alone knows which streams can move, hears of it every second. A
stream goes on at the target as after any move, or, where that is gone by then, at a replica of the router's choice. On
the ingress's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator

from app.backend.protocols import ReplicaHandle
from app.continuation.live import LiveRequest, LiveRequests
from app.metrics.labels import REBALANCED
from kvmanager.routing.roles import Phase
from kvmanager.scheduling.rebalancing import KVReport, LiveStream, Rebalancing

logger = logging.getLogger(__name__)

EVERY_S = 1.0


class StreamRebalancing:
    """That of one ingress."""

    def __init__(self, live: LiveRequests, replicas: ReplicaHandle, block_tokens: int) -> None:
        self._live = live
        self._replicas = replicas
        self._policy = Rebalancing(block_tokens)
        self._failed = False

    async def run(self) -> None:
        """Look again and again, for ever. What fails is logged once: streams stay where they are."""
        while True:
            await asyncio.sleep(EVERY_S)
            try:
                self.look(time.monotonic())
            except Exception:
                if not self._failed:
                    logger.exception("streams cannot be moved from replicas that are short of KV")
                self._failed = True

    def look(self, now: float) -> None:
        """Move the streams that the policy picks now. `now`: of `time.monotonic`."""
        reports = self._replicas.kv_reports()
        for move in self._policy.decide(now, reports, self._streams, self._may_go):
            stream, target = move.stream, move.target
            (one,) = self._live.find(stream.name)
            logger.info(
                "request %s moves from replica %s (%d of %d KV blocks held, %d wanted) to %s (%d of %d): %d tokens, "
                "about %d to come",
                stream.name, stream.replica, *_pool(reports[stream.replica]), reports[stream.replica].wanted,
                target, *_pool(reports[target]), stream.tokens, stream.to_come,
            )  # fmt: skip
            one.attempts.leave(REBALANCED, target)

    def _may_go(self, replica: str, phase: Phase) -> bool:
        return self._replicas.why_not_to(replica, phase) is None

    def _streams(self) -> Iterator[LiveStream]:
        return (_stream(one) for one in self._live.all() if one.attempts.replica)


def _pool(report: KVReport) -> tuple[int, int]:
    return report.held, report.blocks


def _stream(one: LiveRequest) -> LiveStream:
    attempts, answered = one.attempts, one.attempts.answered
    return LiveStream(
        name=one.request_id,
        replica=attempts.replica,
        prompt_tokens=one.prompt_tokens,
        answered=answered.num_tokens,
        to_come=answered.to_come,
        since=attempts.progress.routed,
        moves=attempts.resumed,
        phase=attempts.phase,
        movable=answered.why_not_moved() is None,
    )
