"""What a port asks of the manager for blended prompts."""

from __future__ import annotations

import asyncio
from typing import Any

from configs.kv_section import KVSettings
from deployments.port.cluster_port import ClusterPort
from kvmanager.extensions.blend.chunks import BLEND, BlendQuery, BlendTerms, ChunkQuery
from kvmanager.moves.plan import PlanQuery
from load_tests.harness.patience import patience


class Manager:
    """Remembers what it is asked and told."""

    def __init__(self) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.told: list[tuple[str, Any]] = []

    async def ask(self, method: str, *args: Any, timeout_s: float, late: Any = None) -> Any:
        self.asked.append((method, *args))
        return [3, 0]

    def tell_together(self, calls: Any) -> None:
        self.told += calls


def test_a_blends_question_travels_with_the_plan_and_its_time_with_the_rates() -> None:
    async def check() -> None:
        manager: Any = Manager()
        port = ClusterPort("app", "replica", "node", KVSettings(cpu_tier_bytes=0), manager)
        try:
            blend = BlendQuery([ChunkQuery(4, 70, [b"h"])], 0.1, BlendTerms(2, 6))  # type: ignore[list-item]
            query: Any = PlanQuery([b"own"], [b"exact"], 100, 7, extras={BLEND: blend})  # type: ignore[list-item]
            await port.plan(query)
            assert manager.asked == [("plan", "replica", "node", query)]
            port.report_rate(("blend", 0.5, 0.75))
            port.flush(patience(20))
            assert manager.told == [("report_rates", ("replica", [("blend", 0.5, 0.75)]))]
        finally:
            port.close()

    asyncio.run(check())
