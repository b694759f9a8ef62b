"""The port's circuit breakers: whoever asks for leave to probe says how it ended, also when nobody waits any more."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from configs.kv_section import KVSettings
from deployments.port import tier_reader
from deployments.port.calls import PortWaits
from deployments.port.cluster_port import ClusterPort
from deployments.port.tier_reader import TierReader
from deployments.protocol.manager_client import ManagerUnavailableError
from kvmanager.circuit_breaker import CircuitState
from kvmanager.moves.plan import PlannedLoad, PlanQuery


class Manager:
    """Answers `ask` by what `answer` does."""

    async def ask(self, method: str, *args: Any, timeout_s: float, late: Any = None) -> Any:
        return await self.answer()

    async def answer(self) -> Any:
        raise ManagerUnavailableError("gone")


async def hang() -> None:
    await asyncio.sleep(3600)


async def well() -> None:
    return None


def test_a_client_that_leaves_during_the_probe_leaves_the_next_prompt_its_plan() -> None:
    async def check() -> None:
        manager: Any = Manager()
        port = ClusterPort("app", "replica", "node", KVSettings(cpu_tier_bytes=0), manager)
        try:
            for _ in range(3):
                assert await port.plan(PlanQuery([b"h"])) is None
            assert port.circuits()["manager", ""] == CircuitState.OPEN
            port._plan_circuit._breaker._wait_until = time.monotonic()  # the pause is over
            manager.answer = hang
            probe = asyncio.create_task(port.plan(PlanQuery([b"h"])))
            await asyncio.sleep(0)
            assert port.circuits()["manager", ""] == CircuitState.HALF_OPEN
            probe.cancel()
            await asyncio.gather(probe, return_exceptions=True)
            manager.answer = well
            await port.plan(PlanQuery([b"h"]))
            assert port.circuits()["manager", ""] == CircuitState.CLOSED
            assert not port.counters["plan_not_asked"]
        finally:
            port.close()

    asyncio.run(check())


class Tier:
    """`handle.fetch.remote(keys)`; what it answers is `fake_get`'s."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.fetch = self

    def remote(self, keys: Any) -> tuple[Tier, Any]:
        return self, keys


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> TierReader:
    """Reads from the tiers "near", which is dead, and "far", which answers whoever waits for it."""

    def get(answer: Any, timeout: float) -> Any:
        tier, keys = answer
        if tier.name == "near":
            raise ray.exceptions.RayActorError
        return [("far", [key]) for key in keys] if isinstance(keys, list) and len(keys[0]) > 1 else b"segment"

    def get_actor(name: str, namespace: str) -> Tier:
        return Tier(name.split("::")[-1])

    monkeypatch.setattr(tier_reader, "ray", SimpleNamespace(get=get, get_actor=get_actor, exceptions=ray.exceptions))
    return TierReader("app", "replica", "near", lambda what: None, lambda what, load: None, PortWaits(), {"cpu": 1.0})


def load(number: int, holder: str) -> PlannedLoad:
    return PlannedLoad(bytes([number]) * 32, 4 * number, 4, "cpu", holder, 1000)


def test_a_tier_whose_answer_nobody_looked_at_may_be_asked_again(reader: TierReader) -> None:
    far = reader._circuit("far")
    for _ in range(3):
        far.failed(time.monotonic())
    far._breaker._wait_until = time.monotonic()  # the pause is over
    loads = [load(0, "near"), load(1, "far")]
    assert list(reader.read(loads, time.monotonic() + 1.0)) == [None]
    assert far.state is CircuitState.OPEN
    assert far.allows(time.monotonic())


def test_a_read_that_its_reader_gives_up_ends_its_probes(reader: TierReader) -> None:
    far = reader._circuit("far")
    reading = reader.read([load(1, "near"), load(2, "far")], time.monotonic() + 1.0)
    for _ in range(3):
        far.failed(time.monotonic())
    far._breaker._wait_until = time.monotonic()
    next(reading)
    reading.close()  # type: ignore[attr-defined]
    assert far.state is CircuitState.OPEN
