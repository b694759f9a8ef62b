"""The manager's hand: sends directives for devices to the replicas and waits for their acknowledgement.

Life of a directive: entered in the books (`kvmanager.moves.directive_ledger`) or refused → put into the replica's queue
→ delivered by its long poll, unless its deadline has passed by then → carried out
(`deployments.engine.directive_runner`) → acknowledged; or lost, when it is not acknowledged `GRACE_S` after its
deadline. What an onboarding loads is leased from before it is sent until it has ended. Nothing here is on a request's
path, and no request waits for it.

On the manager's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from deployments.manager.directive_log import DirectiveLog
from deployments.manager.replica_state import QueuedDirective, ReplicaState
from kvmanager.index.locations import Location, Tier
from kvmanager.manager import KVManager
from kvmanager.moves.directive_ledger import DirectiveLedger
from kvmanager.moves.directives import (
    KINDS,
    Clear,
    DeviceDirective,
    DirectiveKind,
    DirectiveOrder,
    DirectiveResult,
    Evict,
    Move,
    Offload,
    Onboard,
    Outcome,
)
from kvmanager.moves.leases import Numbers
from kvmanager.segments.keys import BlockHash, SegmentKey
from kvmanager.segments.spans import SegmentSpan

logger = logging.getLogger(__name__)

GRACE_S = 2.0
"""Time that an acknowledgement may come after its directive's deadline: a transfer ends a little late, and travels."""
OFFLOAD_S = 10.0
MOST_OFFLOADED = 8
"""Segments in one offload that the manager orders by itself."""
MOST_OFFLOADED_DRAINING = 64
"""The same of a replica that ends soon: no request computes there any more, and what is not copied is lost."""
MOST_LOOKED_AFTER = 16
"""Replicas whose devices are looked at for offloads in one turn of housekeeping; the others follow."""


class DirectiveSender:
    """See the module's docstring. `replicas` are the registered replicas, by their unique names."""

    def __init__(self, brain: KVManager, replicas: Mapping[str, ReplicaState], log: DirectiveLog | None = None) -> None:
        self._brain = brain
        self._log = log or DirectiveLog()
        self._replicas = replicas
        self._numbers = Numbers(brain.epoch)
        self._ledger = DirectiveLedger(GRACE_S, self._numbers)
        self._waiting: dict[int, asyncio.Future[DirectiveResult]] = {}
        self._clears: set[int] = set()
        """Numbers of clears, which are in no books."""
        self._tasks: set[asyncio.Task[DirectiveResult]] = set()
        self._looked_after = 0
        self._takes_segments: Mapping[str, Any] = {}

    # What can be ordered.

    async def evict(self, replica: str, hashes: Sequence[BlockHash], deadline_s: float) -> DirectiveResult:
        """Free a sequence's blocks on a device, its end first."""
        keys = tuple(map(SegmentKey, hashes[::-1]))
        return await self._send(replica, Evict(Location(Tier.DEVICE, replica), keys), deadline_s)

    async def offload(self, replica: str, hashes: Sequence[BlockHash], deadline_s: float) -> DirectiveResult:
        """Copy to the CPU tier what a device holds of a sequence and no shared tier has."""
        spans = self._lacking(replica, hashes)
        if not spans:
            here = replica in self._replicas and self._brain.offloads.device_blocks(replica, hashes)
            return DirectiveResult(
                self._ledger.count(DirectiveKind.OFFLOAD, Outcome.DONE if here else Outcome.REFUSED_GONE)
            )
        return await self._send(replica, Offload(tuple(spans)), deadline_s)

    async def onboard(self, replica: str, hashes: Sequence[BlockHash], deadline_s: float) -> DirectiveResult:
        """Bring what the shared tiers have of a sequence to a device, where it counts as used now."""
        kind, state = DirectiveKind.ONBOARD, self._replicas.get(replica)
        if state is None:
            return DirectiveResult(self._ledger.count(kind, Outcome.REFUSED_GONE))
        plan = self._brain.reserve(time.monotonic(), replica, state.node_id, hashes)
        try:
            end = plan.segments[-1].end_block if plan.segments else 0
            if end <= self._brain.offloads.device_blocks(replica, hashes):
                outcome = Outcome.DONE if end else self._nothing_stored(replica, hashes)
                return DirectiveResult(self._ledger.count(kind, outcome))
            tenant = self._brain.tenant_of(plan.segments[-1].key)
            return await self._send(replica, Onboard(tuple(hashes[:end]), plan, tenant), deadline_s)
        finally:
            self._brain.release(plan.lease_id)

    async def move(self, source: str, target: str, wanted: Move, deadline_s: float) -> DirectiveResult:
        """Carry out a move between two replicas, by their unique names."""
        hashes, deadline = wanted.hashes, time.monotonic() + deadline_s
        if target in self._replicas and self._lacking(source, hashes):
            ended = await self.offload(source, hashes, deadline_s)
            if ended.outcome is not Outcome.DONE:
                logger.info("a move begins with what is stored already: the offload ended %s", ended.outcome.value)
        ended = await self.onboard(target, hashes, deadline - time.monotonic())
        if ended.outcome is Outcome.DONE and not wanted.keep:
            await self.evict(source, hashes, deadline - time.monotonic())
        self._ledger.count(DirectiveKind.MOVE, ended.outcome)
        moved = self._place(source), self._place(target), ended.segments, ended.outcome.value
        self._log.note(DirectiveKind.MOVE.value, *moved)
        return ended

    async def clear_device(self, replica: str, tenant: str | None, deadline_s: float) -> int | None:
        """Empty a device's prefix cache, or of a tenant's blocks; how many those were, None without an answer.

        The order stays when `deadline_s` are over.
        """
        state = self._replicas.get(replica)
        if state is None:
            return None
        number = self._numbers.next()
        self._clears.add(number)
        future = self._waiting[number] = asyncio.get_running_loop().create_future()
        state.directives.put_nowait(QueuedDirective(number, Clear(tenant), math.inf))
        try:
            return (await asyncio.wait_for(future, deadline_s)).blocks
        except TimeoutError:
            return None
        finally:
            self._clears.discard(number)
            self._waiting.pop(number, None)

    # The replicas' side.

    def deliver(self, queued: Iterable[QueuedDirective]) -> list[DirectiveOrder]:
        """Return what a replica is to do; what is too late is refused."""
        now = time.monotonic()
        delivered: list[DirectiveOrder] = []
        for number, directive, until in queued:
            if until > now:
                delivered.append(DirectiveOrder(number, directive, until - now))
            else:
                self.acknowledge(number, DirectiveResult(Outcome.REFUSED_LATE))
        return delivered

    def acknowledge(self, number: int, result: DirectiveResult) -> None:
        """A replica has carried out a directive, or not; what comes after it was given up changes nothing."""
        if number in self._clears or self._ledger.acknowledge(number, result.outcome, result.blocks, result.step_s):
            self._end(number, result)

    def forget_replica(self, replica: str) -> None:
        """A replica is gone, with what it had to do."""
        self._lose(self._ledger.forget_replica(replica))

    def keep_house(self, takes_segments: Mapping[str, Any]) -> None:
        """Give up unacknowledged directives, and order offloads to the nodes whose CPU tier takes segments."""
        self._lose(self._ledger.expire(time.monotonic()))
        self._takes_segments = takes_segments
        names = list(self._replicas)
        begin = self._looked_after % max(1, len(names))
        for replica in islice(names[begin:] + names[:begin], MOST_LOOKED_AFTER):
            self._looked_after += 1
            if not self._replicas[replica].drains:
                self._save_hot(replica, MOST_OFFLOADED)
        for replica in names:
            if self._replicas[replica].drains:
                self._save_hot(replica, MOST_OFFLOADED_DRAINING)

    def drain(self, gone: Iterable[str], running: Iterable[str]) -> None:
        """Serve has taken replicas away, and runs these: what only the devices of the former have is offloaded."""
        for replica in running:
            if replica in self._replicas:
                self._replicas[replica].drains = False
        for replica in gone:
            if replica in self._replicas:
                self._replicas[replica].drains = True
                self._save_hot(replica, MOST_OFFLOADED_DRAINING)

    def report(self) -> dict[str, Any]:
        """The books, for `stats`."""
        return self._ledger.report()

    # Inside.

    def _lacking(self, replica: str, hashes: Sequence[BlockHash]) -> list[SegmentSpan]:
        """Return what an offload of a sequence has to copy; nothing for an unknown replica."""
        state = self._replicas.get(replica)
        return [] if state is None else self._brain.offloads.lacking(replica, hashes, _cpu_tier(state.node_id))

    def _save_hot(self, replica: str, most: int) -> None:
        """Order an offload of a device's hottest chain that no shared tier has, unless something is under way there."""
        node_id = self._replicas[replica].node_id
        if not self._takes_segments.get(node_id) or self._ledger.in_flight_at(replica):
            return
        spans = self._brain.offloads.candidates(replica, most, _cpu_tier(node_id))
        if spans:
            self._order_offload(replica, spans)

    def _order_offload(self, replica: str, spans: Sequence[SegmentSpan]) -> None:
        order = self._send(replica, Offload(tuple(spans)), OFFLOAD_S)
        task = asyncio.get_running_loop().create_task(order)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, replica: str, directive: DeviceDirective, deadline_s: float) -> DirectiveResult:
        place = self._place(replica)  # it may be gone when the directive has ended
        ended = await self._sent(replica, directive, deadline_s)
        kind = KINDS[type(directive)]
        source, target = (None, place) if kind is DirectiveKind.ONBOARD else (place, None)
        self._log.note(kind.value, source, target, ended.segments, ended.outcome.value)
        return ended

    def _place(self, replica: str) -> tuple[str, str] | None:
        state = self._replicas.get(replica)
        return None if state is None else (Tier.DEVICE.value, str(state.rank))

    async def _sent(self, replica: str, directive: DeviceDirective, deadline_s: float) -> DirectiveResult:
        kind, state = KINDS[type(directive)], self._replicas.get(replica)
        if state is None:
            return DirectiveResult(self._ledger.count(kind, Outcome.REFUSED_GONE))
        now = time.monotonic()
        begun = self._ledger.begin(now, kind, replica, now + deadline_s)
        if isinstance(begun, Outcome):
            return DirectiveResult(begun)
        future = self._waiting[begun] = asyncio.get_running_loop().create_future()
        state.directives.put_nowait(QueuedDirective(begun, directive, now + deadline_s))
        try:
            async with asyncio.timeout(deadline_s + GRACE_S):
                return await future
        except TimeoutError:
            self._lose(self._ledger.expire(time.monotonic()))
            return DirectiveResult(Outcome.LOST)
        finally:
            self._waiting.pop(begun, None)

    def _nothing_stored(self, replica: str, hashes: Sequence[BlockHash]) -> Outcome:
        return Outcome.DONE if self._brain.offloads.device_blocks(replica, hashes) else Outcome.REFUSED_GONE

    def _lose(self, order_ids: Iterable[int]) -> None:
        for order_id in order_ids:
            logger.warning("directive %d was not acknowledged in time and is given up", order_id)
            self._end(order_id, DirectiveResult(Outcome.LOST))

    def _end(self, order_id: int, ended: DirectiveResult) -> None:
        future = self._waiting.pop(order_id, None)
        if future is not None and not future.done():
            future.set_result(ended)


def _cpu_tier(node_id: str) -> Location:
    return Location(Tier.CPU, node_id)
