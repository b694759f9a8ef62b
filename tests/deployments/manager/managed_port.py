"""A port in memory whose index is a manager's, for engines that are given directives."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

from live_engine import PATIENCE_S, SEGMENT_BLOCKS

from deployments.manager.actor import KVManagerActor
from deployments.protocol.kv_port import OfferedBlocks, SaveGrant
from kvmanager.config import ManagerConfig
from kvmanager.moves.plan import NOTHING_EXPECTED, Plan, PlanQuery
from kvmanager.segments.spans import SegmentSpan
from load_tests.harness.memory_port import MemoryPort
from load_tests.harness.patience import patience

NODE, REPLICA, FINGERPRINT = "node", "replica", b"f" * 32


class Handle:
    """A CPU tier's actor handle, over the port's dict."""

    def __init__(self, port: ManagedPort) -> None:
        self._port = port
        self.evict = self
        self.stats = Stats()

    async def remote(self, keys: Sequence[bytes]) -> int:
        for key in keys:
            self._port.segments.pop(key, None)
        return len(keys)


class Stats:
    async def remote(self) -> dict[str, int]:
        return {}


class ManagedPort(MemoryPort):
    """A `KVPort` whose index is a manager's, which runs on a loop of its own."""

    def __init__(self, **config: Any) -> None:
        super().__init__()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.manager = asyncio.run_coroutine_threadsafe(self._start(config), self._loop).result(patience(PATIENCE_S))

    async def _start(self, config: Any) -> KVManagerActor:
        manager = KVManagerActor(ManagerConfig(blocks_per_segment=SEGMENT_BLOCKS, **config))
        await manager.register_tier(NODE, Handle(self), "first life", 1 << 40, [], [])
        return manager

    def ask(self, method: str, *args: Any, **options: Any) -> Any:
        coroutine = getattr(self.manager, method)(*args, **options)
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(patience(PATIENCE_S))

    async def aask(self, method: str, *args: Any) -> Any:
        coroutine = getattr(self.manager, method)(*args)
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def plan(self, hashes: Sequence[bytes], used: bool = True) -> Plan:
        plan: Plan = self.ask("plan", REPLICA, NODE, PlanQuery(hashes))
        return replace(plan, expected=NOTHING_EXPECTED)  # of rates that no test sets

    def offer(self, offered: OfferedBlocks, segment_bytes: Sequence[int]) -> SaveGrant | None:
        answer = self.ask("offer", REPLICA, NODE, offered, segment_bytes)
        return SaveGrant(answer[0], tuple(answer[1])) if answer else None

    def store(self, grant: SaveGrant, segments: Sequence[tuple[SegmentSpan, Any]]) -> int:
        super().store(grant, segments)
        spans = [span for span, _ in segments]
        return len(self.ask("commit", NODE, spans, [buffer.nbytes for _, buffer in segments]))

    def report_placement(self, stored: list[bytes], removed: list[bytes], cleared: bool) -> None:
        super().report_placement(stored, removed, cleared)
        report = self.manager.report_placement(REPLICA, [(stored, removed, cleared)])
        asyncio.run_coroutine_threadsafe(report, self._loop)

    needs_resync = False

    def report_registration(self, arguments: Sequence[Any], sent: Future[None]) -> None:
        hello = self.manager.register_replica(*arguments)
        asyncio.run_coroutine_threadsafe(hello, self._loop).add_done_callback(lambda _: sent.set_result(None))

    def look_after_tier(self) -> None:
        pass

    def release(self, lease_id: int) -> None:
        asyncio.run_coroutine_threadsafe(self.manager.release([lease_id]), self._loop)

    def flush(self) -> None:
        asyncio.run_coroutine_threadsafe(asyncio.sleep(0), self._loop).result(patience(PATIENCE_S))

    def close(self) -> None:
        async def stop() -> None:
            for task in asyncio.all_tasks() - {asyncio.current_task()}:
                task.cancel()

        asyncio.run_coroutine_threadsafe(stop(), self._loop).result(patience(PATIENCE_S))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(patience(PATIENCE_S))


class Client:
    """A `ManagerClient` without Ray."""

    def __init__(self, port: ManagedPort) -> None:
        self._port = port

    async def ask(self, method: str, *args: Any, timeout_s: float) -> Any:
        return await asyncio.wait_for(self._port.aask(method, *args), timeout_s)
