"""The Redis tier with a real Redis under a manager that records what it is told; in a real Ray where actors matter."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from redis_fixture import (
    FINGERPRINT,
    MIB,
    OTHER_FINGERPRINT,
    PATIENCE_S,
    RedisForTests,
    chain,
    endpoint,
    fill,
    redis_name,
    sealed,
    until,
)

from deployments import redis_server, redis_tier
from deployments.faulty_store import StoreFaults
from deployments.manager_client import MANAGER_ACTOR, SERVE_NAMESPACE, ManagerUnavailableError
from deployments.redis_connection import RedisUnavailableError, connect
from deployments.redis_endpoint import open_store, owner_key
from deployments.redis_tier import RedisTier, RedisTierConfig
from kvmanager.segments import SegmentSpan

pytestmark = pytest.mark.server
_numbers = itertools.count()


class Manager:
    """Keeps every segment whose parent it keeps, up to `room` of them. A life is known once it is registered."""

    def __init__(self, fingerprint: bytes | None, room: int) -> None:
        self.fingerprint = fingerprint
        self.room = room
        self.life = ""
        self.state = ""
        self.states: set[str] = set()
        self.endpoint: Any = None
        self.handle: Any = None
        self.budget = 0
        self.kept: dict[bytes, SegmentSpan] = {}
        self.indexed = False
        self.told: list[str] = []

    async def redis_alive(self, incarnation: str, state: str) -> dict[str, Any]:
        self.state = state
        self.states.add(state)
        return {"known": incarnation == self.life, "fingerprint": self.fingerprint}

    async def register_redis(self, handle: Any, incarnation: str, endpoint: Any, budget_bytes: int) -> None:
        self.told.append("registered")
        self.handle, self.life, self.endpoint, self.budget = handle, incarnation, endpoint, budget_bytes
        self.kept, self.indexed = {}, False

    async def adopt_redis(self, incarnation: str, spans: Sequence[SegmentSpan], sizes: Sequence[int]) -> list[bytes]:
        assert incarnation == self.life
        assert set(sizes) == {16_576}  # header and payload
        for span in spans:
            if len(self.kept) < self.room and (span.parent is None or span.parent in self.kept):
                self.kept[span.key] = span
        return [span.key for span in spans if span.key in self.kept]

    async def redis_indexed(self, incarnation: str) -> None:
        assert incarnation == self.life
        self.told.append("indexed")
        self.indexed = True

    async def redis_lost(self, incarnation: str, state: str) -> None:
        self.told.append(f"lost: {state}")
        self.life, self.kept, self.indexed = "", {}, False

    async def set_fingerprint(self, fingerprint: bytes) -> None:
        self.fingerprint = fingerprint

    async def report(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "handle"}

    async def evict(self, keys: Sequence[bytes]) -> int:
        """As the real one orders it: by the handle that it was given."""
        evict = self.handle.evict
        return int(await (evict.remote(keys) if hasattr(evict, "remote") else evict(keys)))


class Deployment:
    """A manager and a Redis tier of one application, in this process, on an event loop of their own."""

    def __init__(self, **config: Any) -> None:
        self.app = f"redis{next(_numbers)}"
        self.room = config.pop("room", 10**6)
        fingerprint = config.pop("fingerprint", FINGERPRINT)
        self.config = RedisTierConfig(
            **{
                "app_name": self.app, "url": "embedded", "folder": "/nonexistent", "namespace": "tests",
                "budget_bytes": 64 * MIB, "expire_s": 0, "deadline_s": 1.0, **config,
            }
        )  # fmt: skip
        self.start_manager(fingerprint)
        self.start_tier()

    def start_manager(self, fingerprint: bytes | None) -> None:
        self.manager = Manager(fingerprint, self.room)

    def start_tier(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

        async def start() -> RedisTier:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(redis_tier, "ManagerClient", lambda app_name: SimpleNamespace(ask=self.ask_manager))
                tier = RedisTier(self.config)
            tier._address = lambda: tier  # type: ignore[method-assign]
            return tier

        self.tier = self.wait_for(start())

    async def ask_manager(self, method: str, *args: Any, timeout_s: float) -> Any:
        """What `ManagerClient.ask` does."""
        return await getattr(self.manager, method)(*args)

    def wait_for(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_S)

    def ask(self, method: str, *args: Any) -> Any:
        return self.wait_for(getattr(self.manager, method)(*args))

    def ask_tier(self, method: str, *args: Any) -> Any:
        return self.wait_for(getattr(self.tier, method)(*args))

    def report(self) -> dict[str, Any]:
        return self.ask("report")  # type: ignore[no-any-return]

    def until_ok(self, after: int = 0) -> dict[str, Any]:
        """The manager's report once Redis is indexed and it has been told so more than `after` times."""
        until(lambda: self.report()["told"].count("indexed") > after, "Redis is indexed")
        until(lambda: self.report()["state"] == "ok", "Redis is ok")
        return self.report()

    def close(self) -> None:
        try:
            self.ask_tier("close")
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join()
            self.loop.close()


class RayDeployment(Deployment):
    """The same, of actors."""

    def start_manager(self, fingerprint: bytes | None) -> None:
        name = f"SERVE_DEPLOYMENT_ACTOR::{self.app}::replica::v1::{MANAGER_ACTOR}"
        options = {"name": name, "namespace": SERVE_NAMESPACE, "num_cpus": 0}
        self.manager = ray.remote(Manager).options(**options).remote(fingerprint, self.room)
        self.report()

    def start_tier(self) -> None:
        self.tier = ray.remote(num_cpus=0, max_restarts=-1)(RedisTier).remote(self.config)

    def ask(self, method: str, *args: Any) -> Any:
        return ray.get(getattr(self.manager, method).remote(*args), timeout=PATIENCE_S)

    def ask_tier(self, method: str, *args: Any) -> Any:
        return ray.get(getattr(self.tier, method).remote(*args), timeout=PATIENCE_S)

    def close(self) -> None:
        try:
            self.ask_tier("close")
        finally:
            ray.kill(self.tier, no_restart=True)
            ray.kill(self.manager)


@pytest.fixture
def deployments() -> Iterator[Callable[..., Deployment]]:
    """Starts deployments that end with the test."""
    with contextlib.ExitStack() as stack:

        def start(kind: type[Deployment] = Deployment, **config: Any) -> Deployment:
            return stack.enter_context(contextlib.closing(kind(**config)))

        yield start


@pytest.fixture
def in_ray(ray_cluster: Any) -> type[Deployment]:
    ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import this module
    return RayDeployment


@pytest.fixture(scope="module")
def external(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisForTests]:
    found = RedisForTests(tmp_path_factory.mktemp("redis"))
    yield found
    found.stop()


@pytest.fixture(autouse=True)
def _empty(external: RedisForTests) -> None:
    external.empty()


def test_nothing_is_registered_before_the_models_fingerprint_is_known(deployments: Any, tmp_path: Path) -> None:
    deployment = deployments(folder=str(tmp_path), fingerprint=None)
    until(lambda: "waits for the first replica" in deployment.report()["state"], "Redis is ready")
    assert deployment.report()["told"] == []
    deployment.ask("set_fingerprint", FINGERPRINT)
    report = deployment.until_ok()
    assert report["told"] == ["registered", "indexed"]
    assert report["budget"] == 64 * MIB
    assert report["endpoint"].fingerprint == FINGERPRINT
    stats = deployment.ask_tier("stats")
    assert stats["state"] == "ok"
    assert stats["maxmemory_bytes"] > 64 * MIB
    assert stats["version"].startswith(("Redis", "Valkey"))


def test_after_a_restart_everything_is_found_again_parents_first_and_the_rest_is_deleted(
    deployments: Any, tmp_path: Path, in_ray: type[Deployment]
) -> None:
    whole, broken = chain(1, 300), chain(2, 3)
    with_data = RedisForTests(tmp_path)
    fill(with_data.client, whole)
    fill(with_data.client, broken[1:])  # orphans: the first segment is not there
    fill(with_data.client, chain(3, 2), fingerprint=OTHER_FINGERPRINT)
    with_data.client.set(redis_name(b"u" * 32), b"unusable")
    with_data.stop()

    deployment = deployments(in_ray, folder=str(tmp_path))
    report = deployment.until_ok()
    assert list(report["kept"].values()) == whole
    assert deployment.ask_tier("stats")["unusable"] == 1
    client = connect(report["endpoint"].url, 5.0)
    assert client.dbsize() == 300, "orphans, unusable ones and other models' are gone"

    ray.kill(deployment.tier, no_restart=False)  # a crash: the server ends with it, another is started
    report = deployment.until_ok(after=1)
    assert list(report["kept"].values()) == whole
    store = open_store(report["endpoint"])
    assert store.get(whole[299].key) == sealed(whole[299]).tobytes()


def test_what_the_manager_has_no_room_for_is_deleted(deployments: Any, external: RedisForTests) -> None:
    spans = chain(4, 5)
    fill(external.client, spans)
    report = deployments(url=external.url, room=3).until_ok()
    assert set(report["kept"]) == {span.key for span in spans[:3]}
    assert [bool(external.client.exists(redis_name(span.key))) for span in spans] == [True] * 3 + [False] * 2


def test_an_external_redis_keeps_what_belongs_to_others(deployments: Any, external: RedisForTests) -> None:
    fill(external.client, chain(5, 2), fingerprint=OTHER_FINGERPRINT)
    fill(external.client, chain(5, 2), namespace="another")
    external.client.set("anything", "else")
    assert deployments(url=external.url).until_ok()["kept"] == {}
    external.client.delete(owner_key("tests", FINGERPRINT))
    assert external.client.dbsize() == 5


def test_evictions_reach_redis(deployments: Any, external: RedisForTests, in_ray: type[Deployment]) -> None:
    spans = chain(6, 3)
    fill(external.client, spans)
    deployment = deployments(in_ray, url=external.url)
    deployment.until_ok()
    assert deployment.ask("evict", [spans[2].key, b"n" * 32]) == 1
    assert not external.client.exists(redis_name(spans[2].key))
    assert external.client.exists(redis_name(spans[1].key))


def test_a_stopped_redis_is_lost_and_indexed_again_when_it_runs(deployments: Any, external: RedisForTests) -> None:
    fill(external.client, chain(7, 2))
    deployment = deployments(url=external.url, deadline_s=0.1)
    deployment.until_ok()
    os.kill(external.server.pid or 0, signal.SIGSTOP)
    try:
        until(lambda: deployment.report()["told"][-1].startswith("lost: "), "the manager is told")
        assert "does not answer in time" in deployment.report()["told"][-1]
        assert "does not answer in time" in deployment.ask_tier("stats")["state"]
        with pytest.raises(RedisUnavailableError, match="does not answer in time"):
            deployment.ask("evict", [b"k" * 32])
    finally:
        os.kill(external.server.pid or 0, signal.SIGCONT)
    report = deployment.until_ok(after=1)
    assert len(report["kept"]) == 2
    assert sum(told.startswith("lost: ") for told in report["told"]) == 1


def test_a_killed_embedded_server_is_started_again_with_its_data(deployments: Any, tmp_path: Path) -> None:
    deployment = deployments(folder=str(tmp_path))
    report = deployment.until_ok()
    store, span = open_store(report["endpoint"]), chain(8, 1)[0]
    store.put(span.key, sealed(span))
    pid = connect(report["endpoint"].url, 5.0).info("server")["process_id"]
    os.kill(pid, signal.SIGKILL)
    again = deployment.until_ok(after=1)
    assert "lost: the embedded Redis has ended and is started again" in again["told"]
    assert set(again["kept"]) == {span.key}
    assert store.get(span.key) == sealed(span).tobytes(), "who knew its endpoint need not learn another"


def test_a_redis_that_was_restarted_empty_is_a_new_life(deployments: Any, external: RedisForTests) -> None:
    fill(external.client, chain(9, 2))
    deployment = deployments(url=external.url)
    assert len(deployment.until_ok()["kept"]) == 2
    external.client.flushall()
    external.client.config_set("appendonly", "no")
    os.kill(external.server.pid or 0, signal.SIGKILL)
    until(lambda: not external.server.running, "the server is dead")
    external.start()
    assert deployment.until_ok(after=1)["kept"] == {}


def test_a_new_manager_is_told_everything_again(
    deployments: Any, external: RedisForTests, in_ray: type[Deployment]
) -> None:
    fill(external.client, chain(10, 3))
    deployment = deployments(in_ray, url=external.url)
    deployment.until_ok()
    ray.kill(deployment.manager)
    deployment.start_manager(fingerprint=None)
    deployment.ask("set_fingerprint", FINGERPRINT)
    report = deployment.until_ok()
    assert report["told"] == ["registered", "indexed"]
    assert len(report["kept"]) == 3
    assert external.client.dbsize() == 4, "three segments and the claim"


def test_an_application_of_another_model_gets_that_models_segments(deployments: Any, external: RedisForTests) -> None:
    fill(external.client, chain(11, 2))
    fill(external.client, chain(12, 3), fingerprint=OTHER_FINGERPRINT)
    deployment = deployments(url=external.url)
    assert len(deployment.until_ok()["kept"]) == 2
    deployment.ask("set_fingerprint", OTHER_FINGERPRINT)
    report = deployment.until_ok(after=1)
    assert len(report["kept"]) == 3
    assert report["endpoint"].fingerprint == OTHER_FINGERPRINT


def test_two_deployments_never_manage_one_namespace(deployments: Any, external: RedisForTests) -> None:
    first, second = deployments(url=external.url), deployments(url=external.url, fingerprint=None)
    first.until_ok()
    second.ask("set_fingerprint", FINGERPRINT)
    until(lambda: "is used by another crosskv server" in second.report()["state"], "the second is refused")
    assert "namespace 'tests' of this Redis" in second.report()["state"]
    assert "set kv.redis_namespace" in second.report()["state"]
    assert second.report()["told"] == []

    first.ask_tier("close")  # a clean end gives the claim up
    second.until_ok()


def test_who_loses_its_claim_stops_managing(deployments: Any, external: RedisForTests) -> None:
    deployment = deployments(url=external.url)
    deployment.until_ok()
    external.client.set(owner_key("tests", FINGERPRINT), "host elsewhere, process 1, id", px=1500)
    until(lambda: "host elsewhere, process 1)" in deployment.report()["told"][-1], "the manager is told")
    deployment.until_ok(after=1)  # the other's claim has ended


def test_two_namespaces_live_side_by_side(deployments: Any, external: RedisForTests) -> None:
    fill(external.client, chain(13, 2))
    first, second = deployments(url=external.url), deployments(url=external.url, namespace="tests2")
    assert len(first.until_ok()["kept"]) == 2
    assert second.until_ok()["kept"] == {}


def test_an_unusable_redis_is_explained_and_the_tier_lives_on(deployments: Any, external: RedisForTests) -> None:
    deployment = deployments(url="unix://:s3cret@/nonexistent/socket")
    until(lambda: "no Redis can be reached at unix:///nonexistent/socket" in deployment.report()["state"], "the reason")
    assert deployment.report()["told"] == []
    assert "s3cret" not in deployment.report()["state"]


def test_a_small_external_redis_lowers_the_budget(deployments: Any, external: RedisForTests) -> None:
    limit = external.client.config_get("maxmemory")["maxmemory"]
    external.client.config_set("maxmemory", 20 * MIB)
    try:
        assert deployments(url=external.url).until_ok()["budget"] == 16 * MIB
    finally:
        external.client.config_set("maxmemory", limit)


def test_injected_faults_do_not_keep_redis_from_being_indexed(deployments: Any, external: RedisForTests) -> None:
    fill(external.client, chain(14, 2)[1:])  # an orphan, to be deleted
    report = deployments(url=external.url, faults=StoreFaults(error_share=1.0)).until_ok()
    assert report["endpoint"].faults.error_share == 1.0
    assert not external.client.exists(redis_name(chain(14, 2)[1].key))


def test_the_index_is_told_in_chunks(
    deployments: Any, external: RedisForTests, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert redis_tier.ADOPT_CHUNK == 1000
    spans = chain(15, 2500)
    fill(external.client, spans)
    assert list(deployments(url=external.url).until_ok()["kept"].values()) == spans


def test_an_endpoint_names_what_the_workers_need(deployments: Any, external: RedisForTests) -> None:
    report = deployments(url=external.url, expire_s=77, deadline_s=0.7).until_ok()
    assert report["endpoint"] == endpoint(external.url, expire_s=77, deadline_s=0.7)


def test_a_manager_that_was_replaced_while_the_index_was_told_makes_nothing_be_deleted(
    deployments: Any, external: RedisForTests
) -> None:
    fill(external.client, chain(16, 3))
    deployment = deployments(url=external.url, fingerprint=None)

    class Replaced(Manager):
        async def adopt_redis(self, *args: Any) -> list[bytes]:
            deployment.manager = Manager(FINGERPRINT, deployment.room)
            return []  # what the new one answers to a life that it does not know

    deployment.manager = Replaced(FINGERPRINT, deployment.room)
    assert len(deployment.until_ok()["kept"]) == 3


def test_a_redis_that_is_loading_its_data_is_waited_for_without_alarm(
    deployments: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_data = RedisForTests(tmp_path)
    fill(with_data.client, chain(17, 300))
    with_data.stop()
    slowly = "key-load-delay 5000\n"  # microseconds
    monkeypatch.setattr(redis_server, "_CONFIGURATION", redis_server._CONFIGURATION + slowly)
    report = deployments(folder=str(tmp_path)).until_ok()
    assert len(report["kept"]) == 300
    assert any("is loading its data" in state for state in report["states"])
    assert not any("does not answer" in state for state in report["states"])
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_manager_that_does_not_answer_is_told_later(deployments: Any, external: RedisForTests) -> None:
    fill(external.client, chain(18, 2))
    deployment = deployments(url=external.url, fingerprint=None)

    class Absent(Manager):
        async def register_redis(self, *args: Any) -> None:
            raise ManagerUnavailableError("the KV manager is not running")

    deployment.manager = Absent(FINGERPRINT, deployment.room)
    until(lambda: "are not registered" in deployment.ask_tier("stats")["state"], "the state says so")
    deployment.start_manager(FINGERPRINT)
    assert len(deployment.until_ok()["kept"]) == 2
