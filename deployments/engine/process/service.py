"""A replica's questions to its engine's share in the cache, other than prompts: registration, directives, figures.

`ReuseService` lies where the engine does: in the replica, or in the engine's process, and is then asked by way of
`deployments.engine.process.channel`. Its methods are asynchronous, their arguments and answers can be pickled. They
belong to one event loop, which is never the engine's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from concurrent.futures import Future
from typing import TYPE_CHECKING

from deployments.engine.directive_runner import DirectiveRunner
from deployments.engine.metrics import directive_families, port_families, transfer_families
from deployments.engine.scheduling.metrics import scheduling_families
from deployments.protocol.engine_facts import EngineFacts
from deployments.transfer.held_save import after_saves
from kvmanager.moves.directives import Clear, DirectiveOrder, DirectiveResult, Outcome

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from deployments.engine.wiring import KVReuse
    from deployments.port.cluster_port import ClusterPort


class ReuseService:
    """See the module's docstring."""

    def __init__(self, reuse: KVReuse, port: ClusterPort) -> None:
        self._reuse = reuse
        self._port = port
        self._directives = DirectiveRunner(reuse.control, reuse.call)
        self._clearing = asyncio.Lock()

    async def register(self, replica: str, rank: int, node_id: str, facts: EngineFacts) -> None:
        """Introduce the replica to the manager with what its device holds, in order with the changes reported."""
        sent = Future[None]()

        def tell(hashes: list[bytes]) -> None:
            self._port.report_registration((replica, rank, node_id, hashes, facts), sent)

        await asyncio.wrap_future(self._reuse.tell_device(tell))
        await asyncio.wrap_future(sent)

    async def needs_resync(self) -> bool:
        """Whether the manager was not told of some change of the device, so that the replica must register again."""
        return self._port.needs_resync

    async def carry_out(self, order: DirectiveOrder) -> DirectiveResult:
        """Carry out one directive of the manager. By then the manager has been told what is on the device."""
        if isinstance(order.directive, Clear):
            async with self._clearing:  # one slice a step, however many tenants order it
                blocks = await asyncio.wrap_future(self._reuse.clear_device(order.directive.tenant))
            result = DirectiveResult(Outcome.DONE, blocks=blocks)
        else:
            result = await self._directives.carry_out(order)
        await asyncio.to_thread(self._port.flush)
        return result

    async def saved(self, within_s: float) -> bool:
        """Return when all saves that have been started by now have ended, at the latest after `within_s`: have they."""
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(ended.set)

        if not after_saves(self._reuse.transfer, tell):
            return False
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(ended.wait(), within_s)
        return ended.is_set()

    async def look_after_tier(self) -> None:
        """See to it that there is a CPU tier, and that the port knows it (`ClusterPort.look_after_tier`)."""
        await asyncio.to_thread(self._port.look_after_tier)

    async def usage(self) -> dict[str, int]:
        """Blocks of the device pool, all and free and wanted among them, as of the engine's last step."""
        return dict(self._reuse.usage)

    async def families(self) -> list[Metric]:
        """What is counted here. Does not wait for the engine: the pool is as of its last step."""
        return await asyncio.to_thread(self._families)

    def _families(self) -> list[Metric]:
        reuse = self._reuse
        return [
            *transfer_families(reuse.transfer.counters, reuse.usage),
            *port_families(self._port),
            *directive_families(self._directives),
            *reuse.layerwise.times.registry.collect(),
            *scheduling_families(reuse.scheduler),
            *reuse.saves.families(),
            *(family for path in reuse.paths.values() for family in path.families()),
        ]

    def close(self) -> None:
        """End the transfers, and the port."""
        self._reuse.close()
        self._port.close()
