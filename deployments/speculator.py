"""Has conversations' KV on the device when their next turn comes: carries out what `kvmanager.speculation` decides.

On the manager's event loop. It hears of every plan (a prompt came) and of every answer's end, and every `DECIDE_S` asks
the pure `Speculator` for orders, which it gives through `deployments.direction`: a few per replica at once, those worth
most first; what does not get its turn before its deadline is refused as late, and decided anew. An order is a guess:
every refusal is counted, and none is repeated at once. Nothing here is on a request's path but `plan_asked`, which is
O(blocks of the prompt), waits for nobody, and never raises.

A device's size is not told: it is the most blocks that it was ever seen to hold. A device that was never full evicts
nothing, and needs no speculation.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, Protocol

from kvmanager.directives import DirectiveKind, Outcome
from kvmanager.keys import BlockHash
from kvmanager.speculation import Speculator
from kvmanager.speculation_orders import Order, SpeculationSetting

logger = logging.getLogger(__name__)

DECIDE_S = 0.5
MOST_AT_ONCE = 4
"""Orders under way at a replica: half of what `kvmanager.director` allows it, so that others' directives find room."""


class DeviceDirection(Protocol):
    """What is used of `deployments.direction.Direction`. Each answers something with an `outcome`."""

    def pin(
        self, replica: str, hashes: Sequence[BlockHash], ttl_s: float, deadline_s: float
    ) -> Coroutine[Any, Any, Any]:
        """Keep blocks on a device for a time."""

    def unpin(self, replica: str, hashes: Sequence[BlockHash], deadline_s: float) -> Coroutine[Any, Any, Any]:
        """End a pin."""

    def promote(self, replica: str, hashes: Sequence[BlockHash], deadline_s: float) -> Coroutine[Any, Any, Any]:
        """Bring blocks to a device."""


class SpeculationLoop:
    """See the module's docstring.

    `device_blocks(replica, hashes)`: how many leading ones of these a device holds; `device_size(replica)`: how many
    blocks it holds in all. `budget_share`: of a device's blocks, how many may be pinned or promoted for turns to come;
    0 switches everything off.
    """

    def __init__(
        self,
        direction: DeviceDirection,
        device_blocks: Callable[[str, Sequence[BlockHash]], int],
        device_size: Callable[[str], int],
        budget_share: float,
        setting: SpeculationSetting | None = None,
    ) -> None:
        self.failures = 0
        self._direction = direction
        self._device_size = device_size
        self._budget_share = budget_share
        self._speculator = Speculator(setting or SpeculationSetting(), device_blocks)
        self._most_seen: dict[str, int] = {}
        self._gates: dict[str, asyncio.Semaphore] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop: asyncio.Task[None] | None = None
        if budget_share:
            self._loop = asyncio.get_event_loop().create_task(self._run())

    # What the manager tells.

    def plan_asked(self, replica: str, hashes: Sequence[BlockHash]) -> None:
        """A prompt has come to a replica; nothing of it has been loaded yet."""
        if self._loop is not None:
            self._tell(lambda: self._speculator.arrived(time.monotonic(), replica, hashes))

    def answered(self, replica: str, hashes: Sequence[BlockHash], prompt_blocks: int) -> None:
        """An answer has ended: the full blocks of prompt and answer whose KV is computed."""
        if self._loop is not None:
            self._tell(lambda: self._speculator.answered(time.monotonic(), replica, hashes, prompt_blocks))

    def stored(self, num_blocks: int, nbytes: int) -> None:
        """So many bytes hold the KV of so many blocks: what a move costs."""
        if num_blocks > 0:
            self._speculator.block_bytes = nbytes // num_blocks

    def forget_replica(self, replica: str) -> None:
        """A replica is gone, or has begun anew with an empty device."""
        self._most_seen.pop(replica, None)
        self._gates.pop(replica, None)
        self._tell(lambda: self._speculator.forget_replica(time.monotonic(), replica))

    def clear(self) -> None:
        """Somebody empties the devices: nothing that lay there shall be brought back."""
        self._tell(lambda: self._speculator.clear(time.monotonic()))

    def report(self) -> dict[str, Any]:
        """The books, for `stats`."""
        return {"enabled": self._loop is not None, "failures": self.failures, **self._speculator.stats()}

    def close(self) -> None:
        """End the loop, and what it has under way."""
        for task in (self._loop, *self._tasks):
            if task is not None:
                task.cancel()

    # Inside.

    def _tell(self, what: Callable[[], object]) -> None:
        try:
            what()
        except Exception:
            self._failed("a speculation could not be told what happened")

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(DECIDE_S)
            try:
                self._decide()
            except Exception:
                self._failed("deciding what to promote failed")

    def seen(self, replica: str) -> None:
        """A replica's device has changed: it may have been fuller than ever. O(1)."""
        size = self._device_size(replica)
        if size > self._most_seen.get(replica, 0):
            self._most_seen[replica] = size
            self._speculator.set_budget(replica, int(size * self._budget_share))

    def _decide(self) -> None:
        for order in self._speculator.orders(time.monotonic()):
            task = asyncio.get_running_loop().create_task(self._carry_out(order))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _carry_out(self, order: Order) -> None:
        """Give an order as soon as few enough are under way at its replica, and settle it."""
        until = time.monotonic() + order.deadline_s
        outcome = Outcome.FAILED
        try:
            async with self._gates.setdefault(order.replica, asyncio.Semaphore(MOST_AT_ONCE)):
                left = until - time.monotonic()
                outcome = (await self._give(order, left)).outcome if left > 0 else Outcome.REFUSED_LATE
        except Exception:
            self._failed("an order for a turn to come failed")
        finally:
            if order.order_id:
                self._tell(lambda: self._speculator.ended(time.monotonic(), order.order_id, outcome))

    def _give(self, order: Order, deadline_s: float) -> Coroutine[Any, Any, Any]:
        if order.kind is DirectiveKind.PIN:
            return self._direction.pin(order.replica, order.hashes, order.ttl_s, deadline_s)
        if order.kind is DirectiveKind.UNPIN:
            return self._direction.unpin(order.replica, order.hashes, deadline_s)
        return self._direction.promote(order.replica, order.hashes, deadline_s)

    def _failed(self, what: str) -> None:
        self.failures += 1
        if self.failures == 1:
            logger.exception("%s (counted from now on, logged once)", what)
