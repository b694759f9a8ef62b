"""A replica's ear for the manager: registers with it, again with every new one, and carries out its directives.

One long poll at a time, which is the replica's heartbeat too. Every directive is a task of its own, so that a long one
(an onboarding) holds up neither the heartbeat nor the next one; `deployments.engine.directive_runner` keeps the
sequence.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from deployments.protocol.manager_client import (
    DIRECTIVES_WAIT_S,
    MANAGER_ANSWER_S,
    ManagerClient,
    ManagerUnavailableError,
)

if TYPE_CHECKING:
    from deployments.engine.handle import EngineHandle
    from kvmanager.moves.directives import DirectiveOrder

logger = logging.getLogger(__name__)

MANAGER_RETRY_S = 0.5
TIER_CARE_S = 5.0
"""How often a replica looks whether its node has a CPU tier: far more often than the tier's
`TierTimes.orphan_s`."""


class ManagerLink:
    """See the module's docstring. On the replica's event loop.

    `rank` says which number the replica has now: Serve may change it.
    """

    def __init__(
        self,
        manager: ManagerClient,
        name: str,
        rank: Callable[[], int],
        node_id: str,
        engine: EngineHandle,
    ) -> None:
        self._manager = manager
        self._name = name
        self._rank = rank
        self._node_id = node_id
        self._engine = engine
        self._directives: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        self._tasks = [self._loop.create_task(self._poll()), self._loop.create_task(self._look_after_tier())]

    def close(self) -> None:
        """Hear no more, and give up what is under way; the engine ends it by itself."""
        for task in (*self._tasks, *self._directives):
            task.cancel()

    def close_from_thread(self) -> None:
        """The same from another thread than the loop's, as soon as the loop comes to it."""
        with contextlib.suppress(RuntimeError):  # the loop is closed, and nothing is heard any more
            self._loop.call_soon_threadsafe(self.close)

    async def _poll(self) -> None:
        refused = False
        while True:
            try:
                directives = await self._manager.ask(
                    "take_directives", self._name, DIRECTIVES_WAIT_S, self._rank(), await self._engine.kv_report(),
                    timeout_s=DIRECTIVES_WAIT_S + MANAGER_ANSWER_S,
                )  # fmt: skip
                if directives is None or await self._engine.needs_resync():
                    if directives is None and refused:
                        await asyncio.sleep(MANAGER_RETRY_S)  # this replica has just been registered there
                    await self._register()
                refused = directives is None
                for directive in directives or ():
                    task = asyncio.get_running_loop().create_task(self._carry_out(directive))
                    self._directives.add(task)
                    task.add_done_callback(self._directives.discard)
            except ManagerUnavailableError:
                await asyncio.sleep(MANAGER_RETRY_S)
            except Exception:
                logger.exception("the KV manager's directives could not be taken")
                await asyncio.sleep(MANAGER_RETRY_S)

    async def _register(self) -> None:
        """Introduce the replica, with what its device holds."""
        if self._engine.shares_kv:
            await self._engine.register(self._rank())
            return
        hello: tuple[Any, ...] = (self._name, self._rank(), self._node_id, [], self._engine.facts)
        await self._manager.ask("register_replica", *hello, timeout_s=MANAGER_ANSWER_S)

    async def _look_after_tier(self) -> None:
        """See to it that the node has a CPU tier, whatever has become of the one there was."""
        while self._engine.shares_kv:
            await asyncio.sleep(TIER_CARE_S)
            try:
                await self._engine.look_after_tier()
            except Exception:
                logger.exception("the node's CPU tier could not be looked after")

    async def _carry_out(self, directive: DirectiveOrder) -> None:
        try:
            result = await self._engine.carry_out(directive)
            await self._manager.ask("acknowledge", directive.number, result, timeout_s=MANAGER_ANSWER_S)
        except ManagerUnavailableError:
            pass  # a new manager knows nothing of the directive
        except Exception:
            logger.exception("a directive of the KV manager failed")
