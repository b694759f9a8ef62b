"""A replica registers in order with what it reports: the manager knows its device, whatever happens meanwhile."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from typing import Any

import pytest
from kv_cluster import FINGERPRINT

from configs.kv_section import KVSettings
from deployments.engine.handle import EngineHandle
from deployments.engine.process.service import ReuseService
from deployments.manager.actor import KVManagerActor
from deployments.port import cluster_port
from deployments.port.cluster_port import ClusterPort
from deployments.protocol.engine_facts import EngineFacts
from deployments.protocol.manager_client import ManagerUnavailableError
from deployments.replica import manager_link
from deployments.replica.manager_link import ManagerLink
from kvmanager.config import ManagerConfig
from kvmanager.scheduling.rebalancing import KVReport
from load_tests.harness.patience import patience

BLOCKS = [bytes([number]) * 32 for number in range(8)]


class Client:
    """A `ManagerClient` of a manager on the test's loop: what is told, and asked, is carried out in that order."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.manager = KVManagerActor(ManagerConfig(blocks_per_segment=1))
        self.hangs = False

    async def ask(self, method: str, *args: Any, timeout_s: float) -> Any:
        if self.hangs:
            raise ManagerUnavailableError("hangs")
        return await getattr(self.manager, method)(*args)

    def tell(self, method: str, *args: Any) -> None:
        if self.hangs:
            raise ManagerUnavailableError("hangs")
        self.loop.call_soon_threadsafe(lambda: self.loop.create_task(getattr(self.manager, method)(*args)))

    def tell_together(self, calls: Any) -> None:
        self.tell("batch", *calls)


class Engine:
    """A device pool, and the engine thread that alone changes it and reports the changes."""

    def __init__(self, port: ClusterPort) -> None:
        self.port = port
        self.blocks = set(BLOCKS)
        self.after_reading: Callable[[], None] = lambda: None
        self.control = self.call = None
        self.usage = {"blocks": 101, "free_blocks": 40, "cached_blocks": 0, "wanted_blocks": 7}

    def tell_device(self, tell: Callable[[list[bytes]], None]) -> Future[None]:
        done = Future[None]()

        def run() -> None:
            tell(sorted(self.blocks))
            self.after_reading()
            done.set_result(None)

        threading.Thread(target=run).start()
        return done

    def remove(self, block: bytes) -> None:
        self.blocks.remove(block)
        self.port.report_placement([], [block], False)


def handle(port: ClusterPort, engine: Engine) -> EngineHandle:
    """The door of a handle whose engine is the test's."""
    made: Any = object.__new__(EngineHandle)
    made._port, made._service = port, ReuseService(engine, port)  # type: ignore[arg-type]
    made._replica, made._node_id, made.fingerprint, made.apart = "replica", "node", FINGERPRINT, None
    return made


@pytest.fixture
def replica(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Runs a test's coroutine with a client, an engine, and what starts the replica's link."""
    monkeypatch.setattr(manager_link, "DIRECTIVES_WAIT_S", 0.02)
    monkeypatch.setattr(manager_link, "MANAGER_RETRY_S", 0.02)
    monkeypatch.setattr(cluster_port, "REPORT_EVERY_S", 0.0)

    def run(test: Callable[[Client, Engine, Callable[[], ManagerLink]], Any]) -> None:
        async def main() -> None:
            client: Any = Client()
            port = ClusterPort("app", "replica", "node", KVSettings(cpu_tier_bytes=0), client)  # type: ignore[arg-type]
            engine: Any = Engine(port)
            takers: list[ManagerLink] = []

            def start() -> ManagerLink:
                takers.append(ManagerLink(client, "replica", lambda: 0, "node", handle(port, engine)))
                return takers[-1]

            try:
                await asyncio.wait_for(test(client, engine, start), patience(20))
            finally:
                for taker in takers:
                    taker.close()
                await asyncio.to_thread(port.close)
                client.manager._housekeeping.cancel()

        asyncio.run(main())

    return run


def on_device(client: Client) -> set[bytes]:
    return set(client.manager._brain._devices.held("replica"))


async def soon(holds: Callable[[], bool]) -> None:
    while not holds():  # noqa: ASYNC110 - nothing announces it
        await asyncio.sleep(0.01)


def test_a_block_that_goes_right_after_the_device_was_read_is_not_taken_to_be_there(replica: Any) -> None:
    async def check(client: Client, engine: Engine, start: Callable[[], ManagerLink]) -> None:
        def remove() -> None:
            engine.remove(BLOCKS[0])
            engine.port.flush(10.0)  # its report has gone before the registration's answer can be there

        engine.after_reading = remove
        start()
        await soon(lambda: "replica" in client.manager._replicas)
        await soon(lambda: on_device(client) == engine.blocks)

    replica(check)


def test_changes_that_a_manager_was_not_told_make_the_replica_register_again(replica: Any) -> None:
    async def check(client: Client, engine: Engine, start: Callable[[], ManagerLink]) -> None:
        start()
        await soon(lambda: on_device(client) == set(BLOCKS))
        client.hangs = True
        await asyncio.to_thread(engine.remove, BLOCKS[1])
        await soon(lambda: engine.port.needs_resync)
        assert BLOCKS[1] in on_device(client)
        client.hangs = False
        await soon(lambda: on_device(client) == engine.blocks)
        assert not engine.port.needs_resync

    replica(check)


def test_a_registration_that_did_not_reach_the_manager_is_still_owed(replica: Any) -> None:
    async def check(client: Client, engine: Engine, start: Callable[[], ManagerLink]) -> None:
        client.hangs = True
        sent = Future[None]()
        await asyncio.to_thread(
            engine.port.report_registration, ("replica", 0, "node", [], EngineFacts(FINGERPRINT)), sent
        )
        with pytest.raises(ManagerUnavailableError):
            await asyncio.wrap_future(sent)
        assert engine.port.needs_resync

    replica(check)


def test_a_manager_that_does_not_take_a_registration_is_not_asked_without_a_pause(
    replica: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def check(client: Client, engine: Engine, start: Callable[[], ManagerLink]) -> None:
        pauses: list[float] = []
        told: list[str] = []
        sleep = asyncio.sleep

        async def noted(seconds: float) -> None:
            pauses.append(seconds)
            await sleep(0)

        monkeypatch.setattr(manager_link.asyncio, "sleep", noted)
        monkeypatch.setattr(client, "tell", lambda method, *args: told.append(method))
        start()
        while len(told) < 5:
            await sleep(0.01)
        assert pauses.count(manager_link.MANAGER_RETRY_S) >= 4

    replica(check)


def test_a_replica_sees_to_its_nodes_tier_as_long_as_it_lives(replica: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manager_link, "TIER_CARE_S", 0.01)

    async def check(client: Client, engine: Engine, start: Callable[[], ManagerLink]) -> None:
        looked: list[int] = []

        def look() -> None:
            looked.append(threading.get_ident())
            if len(looked) == 1:
                raise RuntimeError("Ray's directory does not answer in this test")

        monkeypatch.setattr(engine.port, "look_after_tier", look)
        client.hangs = True
        start()
        await soon(lambda: len(looked) >= 3)
        assert threading.get_ident() not in looked, "it may block"

    replica(check)


def test_the_manager_hears_with_every_poll_what_the_device_pool_holds(replica: Any) -> None:
    async def check(client: Client, engine: Engine, start: Callable[[], ManagerLink]) -> None:
        start()

        async def report() -> KVReport | None:
            told: Mapping[str, KVReport] = (await client.manager.api("parts"))["kv"]
            return told.get("replica")

        while (first := await report()) is None:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.01)
        assert (first.blocks, first.held, first.wanted) == (100, 60, 7), "vLLM keeps a block for itself"
        engine.usage["free_blocks"] = 30
        while (later := await report()) is None or later.held == first.held:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert (later.held, later.at > first.at) == (70, True)

    replica(check)


def test_a_replica_that_keeps_its_kv_to_itself_reports_none() -> None:
    made: Any = object.__new__(EngineHandle)
    made._service = None
    assert asyncio.run(made.kv_report()) is None


def test_a_replica_that_shares_no_kv_though_others_do_says_why(replica: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def check(client: Client, engine: Engine, start: Callable[[], ManagerLink]) -> None:
        link = start()
        monkeypatch.setattr(type(link._engine), "shares_kv", False)
        link._engine.apart = "its processors are others"
        await link._register()
        assert (await client.manager.api("parts"))["apart"] == {0: "its processors are others"}

    replica(check)
