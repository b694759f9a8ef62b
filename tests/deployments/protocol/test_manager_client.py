"""The client of the manager with a real Ray: gone is an answer, and a new manager of the same name is found."""

from __future__ import annotations

import asyncio
import queue
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
import ray
from kv_cluster import PATIENCE_S
from ray import cloudpickle

from deployments.protocol.manager_client import ManagerClient, ManagerUnavailableError
from load_tests.harness.patience import patience

pytestmark = pytest.mark.server
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import a test

QUICK_S = 5.0
"""On a machine at rest; the calls' own time-out is ten minutes."""


class Manager:
    """Answers with its number, or not at all."""

    def __init__(self, number: int) -> None:
        self._number = number
        self._gate = asyncio.Event()

    async def number(self) -> int:
        return self._number

    async def gated(self) -> int:
        await self._gate.wait()
        return self._number

    async def plan(self) -> int:
        return self._number

    async def batch(self, *calls: Any) -> list[tuple[bool, Any]]:
        await self._gate.wait()
        return [(True, await getattr(self, method)(*arguments)) for method, arguments in calls]

    async def open(self, gate: bool) -> None:
        (self._gate.set if gate else self._gate.clear)()

    async def hang(self) -> None:
        await asyncio.sleep(600)

    async def fail(self) -> None:
        raise ValueError("a defect")


def start(app: str, number: int) -> Any:
    name = f"SERVE_DEPLOYMENT_ACTOR::{app}::replica::v{number}::kv_manager"
    handle = ray.remote(Manager).options(name=name, namespace="serve", num_cpus=0).remote(number)
    ray.get(handle.number.remote(), timeout=patience(PATIENCE_S))
    return handle


@pytest.fixture(scope="module")
def managers(ray_cluster: Any) -> Iterator[dict[str, Any]]:
    """The managers of two applications, by name."""
    running = {app: start(app, number) for number, app in enumerate(("here", "there"))}
    yield running
    for handle in running.values():
        ray.kill(handle)


async def patiently(client: ManagerClient) -> int:
    while True:
        try:
            return await client.ask("number", timeout_s=patience(PATIENCE_S))
        except ManagerUnavailableError:
            await asyncio.sleep(0.05)


def test_each_application_finds_its_own_manager(managers: Any) -> None:
    assert [ManagerClient(app).ask_blocking("number", timeout_s=patience(PATIENCE_S)) for app in ("here", "there")] == [
        0,
        1,
    ]


def test_an_application_without_a_manager_is_told_so_at_once(managers: Any) -> None:
    client = ManagerClient("nowhere")
    started = time.monotonic()
    for _ in range(100):
        with pytest.raises(ManagerUnavailableError, match="not running"):
            client.ask_blocking("number", timeout_s=patience(600))
        with pytest.raises(ManagerUnavailableError, match="not running"):
            client.tell("number")
    assert time.monotonic() - started < patience(QUICK_S)


def test_a_manager_that_hangs_costs_the_time_out_and_stays_known(managers: Any) -> None:
    client = ManagerClient("here")

    async def check() -> None:
        with pytest.raises(ManagerUnavailableError, match=r"did not answer hang within 0\.2 s"):
            await client.ask("hang", timeout_s=0.2)
        assert await client.ask("number", timeout_s=patience(PATIENCE_S)) == 0

    asyncio.run(check())
    with pytest.raises(ManagerUnavailableError, match=r"did not answer hang within 0\.2 s"):
        client.ask_blocking("hang", timeout_s=0.2)


@pytest.mark.parametrize("method", ["plan", "gated"], ids=["in a batch", "by itself"])
def test_what_is_answered_too_late_is_heard(managers: Any, method: str) -> None:
    client = ManagerClient("here")
    ray.get(managers["here"].open.remote(False), timeout=patience(PATIENCE_S))

    async def check() -> None:
        heard: asyncio.Queue[int] = asyncio.Queue()
        assert await client.ask("number", timeout_s=patience(PATIENCE_S)) == 0
        with pytest.raises(ManagerUnavailableError, match="did not answer"):
            await client.ask(method, timeout_s=0.2, late=heard.put_nowait)
        assert heard.empty()
        await client.ask("open", True, timeout_s=patience(PATIENCE_S))
        assert await asyncio.wait_for(heard.get(), patience(PATIENCE_S)) == 0
        assert await client.ask(method, timeout_s=patience(PATIENCE_S), late=heard.put_nowait) == 0
        assert heard.empty()

    asyncio.run(check())


def test_what_is_answered_too_late_is_heard_by_a_thread_that_does_not_wait(managers: Any) -> None:
    client = ManagerClient("here")
    ray.get(managers["here"].open.remote(False), timeout=patience(PATIENCE_S))
    heard: queue.Queue[int] = queue.Queue()
    client.find(patience(PATIENCE_S))
    with pytest.raises(ManagerUnavailableError, match="did not answer"):
        client.ask_blocking("gated", timeout_s=0.2, late=heard.put)
    assert heard.empty()
    client.ask_blocking("open", True, timeout_s=patience(PATIENCE_S))
    assert heard.get(timeout=patience(PATIENCE_S)) == 0


def test_a_managers_defect_is_its_own_and_the_caller_goes_on(managers: Any) -> None:
    client = ManagerClient("here")
    with pytest.raises(ManagerUnavailableError, match="a defect"):
        client.ask_blocking("fail", timeout_s=patience(PATIENCE_S))
    assert client.ask_blocking("number", timeout_s=patience(PATIENCE_S)) == 0


def test_a_manager_that_died_is_noticed_quickly_and_its_successor_found(managers: Any) -> None:
    client = ManagerClient("here")

    async def check() -> None:
        assert await client.ask("number", timeout_s=patience(PATIENCE_S)) == 0
        ray.kill(managers["here"])
        started = time.monotonic()
        with pytest.raises(ManagerUnavailableError):
            await client.ask("hang", timeout_s=patience(600))
        with pytest.raises(ManagerUnavailableError):
            await client.ask("hang", timeout_s=patience(600))
        assert time.monotonic() - started < patience(QUICK_S)

        managers["here"] = start("here", 2)
        assert await asyncio.wait_for(patiently(client), patience(PATIENCE_S)) == 2

    asyncio.run(check())
