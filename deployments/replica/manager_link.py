"""A replica's ear for the manager: registers with it, again with every new one, and carries out its orders.

One long poll at a time, which is the replica's heartbeat too. Every order is a task of its own, so that a long one
(a promotion) holds up neither the heartbeat nor the next order; `deployments.engine.directive_runner` keeps the
sequence.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from deployments.port.cluster_port import ClusterPort
from deployments.protocol.manager_client import MANAGER_ANSWER_S, ManagerClient, ManagerUnavailableError

if TYPE_CHECKING:
    from deployments.engine.directive_runner import DirectiveRunner
    from deployments.engine.wiring import KVReuse

logger = logging.getLogger(__name__)

ORDERS_WAIT_S = 2.0
"""How long one poll for orders waits at the manager."""
MANAGER_RETRY_S = 0.5
TIER_CARE_S = 5.0
"""How often a replica looks whether its node has a CPU tier: far more often than
`deployments.cpu_tier.actor.ORPHAN_S`."""
NO_CACHE = {"outcome": "refused_gone"}
"""What a replica without KV reuse answers to every directive."""


class ManagerLink:
    """See the module's docstring. On the replica's event loop. Without a cache, `reuse` and the like are None.

    `rank` says which number the replica has now: Serve may change it.
    """

    def __init__(
        self,
        manager: ManagerClient,
        name: str,
        rank: Callable[[], int],
        node_id: str,
        fingerprint: bytes,
        port: ClusterPort | None,
        reuse: KVReuse | None,
        device: DirectiveRunner | None,
    ) -> None:
        self._manager = manager
        self._name = name
        self._rank = rank
        self._node_id = node_id
        self._fingerprint = fingerprint
        self._port = port
        self._reuse = reuse
        self._device = device
        self._orders: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._tasks = [self._loop.create_task(self._poll()), self._loop.create_task(self._look_after_tier())]

    def close(self) -> None:
        """Hear no more, and give up what is under way; the engine ends it by itself."""
        for task in (*self._tasks, *self._orders):
            task.cancel()

    def close_from_thread(self) -> None:
        """The same from another thread than the loop's, as soon as the loop comes to it."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing is heard any more
            self._loop.call_soon_threadsafe(self.close)

    async def _poll(self) -> None:
        refused = False
        while True:
            try:
                orders = await self._manager.ask(
                    "take_directives",
                    self._name,
                    ORDERS_WAIT_S,
                    self._rank(),
                    timeout_s=ORDERS_WAIT_S + MANAGER_ANSWER_S,
                )
                if orders is None or (self._port and self._port.untold):
                    if orders is None and refused:
                        await asyncio.sleep(MANAGER_RETRY_S)  # it has just been told who this is
                    await self._register()
                refused = orders is None
                for order in orders or ():
                    task = asyncio.get_running_loop().create_task(self._carry_out(order))
                    self._orders.add(task)
                    task.add_done_callback(self._orders.discard)
            except ManagerUnavailableError:
                await asyncio.sleep(MANAGER_RETRY_S)
            except Exception:
                logger.exception("the KV manager's orders could not be taken")
                await asyncio.sleep(MANAGER_RETRY_S)

    async def _register(self) -> None:
        """Introduce the replica with what its device holds, in order with the changes that the port reports."""
        port, reuse = self._port, self._reuse
        if port is None or reuse is None:
            hello: tuple[Any, ...] = (self._name, self._rank(), self._node_id, [], self._fingerprint)
            await self._manager.ask("register_replica", *hello, timeout_s=MANAGER_ANSWER_S)
            return
        rank, sent = self._rank(), Future[None]()

        def tell(hashes: list[bytes]) -> None:
            port.report_registration((self._name, rank, self._node_id, hashes, self._fingerprint), sent)

        await asyncio.wrap_future(reuse.tell_device(tell))
        await asyncio.wrap_future(sent)

    async def _look_after_tier(self) -> None:
        """See to it that the node has a CPU tier, whatever has become of the one there was."""
        while self._port is not None:
            await asyncio.sleep(TIER_CARE_S)
            try:
                await asyncio.to_thread(self._port.look_after_tier)
            except Exception:
                logger.exception("the node's CPU tier could not be looked after")

    async def _carry_out(self, order: dict[str, Any]) -> None:
        try:
            result: Any
            if order["kind"] != "clear_device":
                result = await self._device.carry_out(order) if self._device else NO_CACHE
            else:
                cleared = self._reuse.clear_device(order.get("tenant")) if self._reuse else None
                result = 0 if cleared is None else await asyncio.wrap_future(cleared)
            if self._port:
                # The manager shall know what is on the device when it hears that the order is done.
                await asyncio.to_thread(self._port.flush)
            await self._manager.ask("acknowledge", order["id"], result, timeout_s=MANAGER_ANSWER_S)
        except ManagerUnavailableError:
            pass  # a new manager knows nothing of the order
        except Exception:
            logger.exception("an order of the KV manager failed")
