"""Real servers, started and ended as a user does: two vLLM replicas in float32, Ray Serve, and a Redis of our own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from load_tests.faults.catalogue import World, started_world
from load_tests.harness.running_server import RunningServer, started


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The server that most tests share: two replicas in float32, and Redis behind a proxy that can fail."""
    http = {"debug_headers": True, "max_ongoing_requests": 64, "max_queued_requests": 64}
    kv = {"lease_s": 5.0}  # what a lost plan holds is free after so long, and the tests wait for that
    settings = {"dtype": "float32", "http": http, "kv": kv}
    with started_world(tmp_path_factory.mktemp("server"), settings) as running:
        yield running


@pytest.fixture(scope="session")
def server(world: World) -> RunningServer:
    """The same server, for tests that leave its Redis alone."""
    return world.server


@pytest.fixture
def private_server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    """A server of the test's own, with the settings that it is parametrized with."""
    with started(tmp_path, request.param) as running:
        yield running


@pytest.fixture(scope="session", autouse=True)
def _no_proxy() -> None:
    os.environ["NO_PROXY"] = "127.0.0.1,localhost"
