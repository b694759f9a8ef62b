"""Real servers, started and ended as a user does: two vLLM replicas in float32, Ray Serve, and a Redis of our own."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
from first_minute import WithoutRedis, look

from load_tests.faults.catalogue import World, started_world
from load_tests.harness.running_server import RunningServer, started


@pytest.fixture(scope="session")
def _started_without_redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[World, WithoutRedis]]:
    """The server that most tests share, and how it did before Redis took its password."""
    http = {"debug_headers": True, "max_ongoing_requests": 64, "max_queued_requests": 64}
    kv = {"lease_s": 2.0, "save_deadline_s": 8.0}  # what is lost is free after so long, and the tests wait for that
    routing = {"rebalance_streams": True}
    settings = {"dtype": "float32", "http": http, "kv": kv, "routing": routing}
    with started_world(tmp_path_factory.mktemp("server"), settings, redis_password="another") as world:
        seen = look(world.server)
        world.redis.change_password()
        world.server.wait_until(lambda: world.server.health()["status"] == "ok", "Redis takes the server", 60.0)
        yield world, seen


@pytest.fixture(scope="session")
def without_redis(_started_without_redis: tuple[World, WithoutRedis]) -> WithoutRedis:
    """The shared server's first minute."""
    return _started_without_redis[1]


@pytest.fixture(scope="session")
def world(_started_without_redis: tuple[World, WithoutRedis]) -> World:
    """The server that most tests share: two replicas in float32, and Redis behind a proxy that can fail."""
    return _started_without_redis[0]


@pytest.fixture(scope="session")
def server(world: World) -> RunningServer:
    """The same server, for tests that leave its Redis alone."""
    return world.server


@pytest.fixture
def private_server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    """A server of the test's own, with the settings that it is parametrized with."""
    with started(tmp_path, request.param) as running:
        yield running


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that failed shows what its server has said last."""
    report = yield
    if report.failed:
        servers = [item.funcargs[name] for name in ("private_server", "usual", "server") if name in item.funcargs]
        servers += [item.funcargs[name].server for name in ("world",) if name in item.funcargs and not servers]
        report.sections += [("what the server said last", server.said()) for server in servers]
    return report


@pytest.fixture(scope="session", autouse=True)
def _no_proxy() -> None:
    os.environ["NO_PROXY"] = "127.0.0.1,localhost"
