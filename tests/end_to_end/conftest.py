"""Real servers, started and ended as a user does: Ray Serve, vLLM replicas, Redis, the launcher.

Each kind is started once in a run, and one lives at a time: two cores have room for one. A file finds the server as it
was after its start (`RunningServer.reset`).
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest
from first_minute import WithoutRedis, look
from keys import (
    COLLECTORS_PASSWORD,
    FOREIGN_KEY,
    HUB_TOKEN,
    METRICS_KEY,
    OPERATOR_KEY,
    SERVER_SECRET,
    TENANT_KEYS,
)

from load_tests.faults.catalogue import World, started_world
from load_tests.harness.server import RunningServer, started
from tests.durations import timed_start

T = TypeVar("T")

FIRST_MINUTES: dict[int, WithoutRedis] = {}
"""Of servers that began without Redis, by port."""
SERVER_FIXTURES = ("private_server", "plain", "keyed", "process_world", "world", "server")


class OneServer:
    """The server of this process. Each kind has a name; a kind that is asked for ends the one that runs."""

    def __init__(self) -> None:
        self._stack = contextlib.ExitStack()
        self._name = ""
        self._running: Any = None

    def end(self) -> None:
        """End the running server, if there is one."""
        self._name, self._running = "", None
        self._stack.close()

    def get(self, name: str, start: Callable[[contextlib.ExitStack], T]) -> T:
        """What `start` gives, a `RunningServer` or a `World`: of a new server, or of the running one, reset.

        The stack that `start` gets is closed at the server's end.
        """
        if name == self._name:
            (self._running.server if isinstance(self._running, World) else self._running).reset()
        else:
            self.end()
            with timed_start("server", name):
                self._running = start(self._stack)
            self._name = name
        running: T = self._running
        return running


ONLY = pytest.StashKey[OneServer]()


@pytest.fixture(scope="session")
def whole_server(pytestconfig: pytest.Config) -> Iterator[OneServer]:
    """For all fixtures that start one."""
    pytestconfig.stash[ONLY] = only = OneServer()
    yield only
    only.end()


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """End the server after the last test that needs one: it takes a fifth of a core while it has nothing to do."""
    if nextitem is None or "whole_server" not in getattr(nextitem, "fixturenames", ()):
        only = item.config.stash.get(ONLY, None)
        if only is not None:
            only.end()


@pytest.fixture(scope="module")
def plain(whole_server: OneServer, tmp_path_factory: pytest.TempPathFactory) -> RunningServer:
    """A server as `make serve` starts it. Only prompts that are to be blended see `fill`."""
    # What is stored is loaded and blended even where a busy machine has learned that it would compute it sooner.
    settings = {"blending": {"fill": "first"}, "kv": {"load_or_recompute": "load"}}
    return whole_server.get("plain", lambda s: s.enter_context(started(tmp_path_factory.mktemp("plain"), settings)))


@pytest.fixture(scope="module")
def keyed(whole_server: OneServer, tmp_path_factory: pytest.TempPathFactory) -> RunningServer:
    """A server with secrets of each kind but Redis' password, and without Redis.

    Its replicas have roles, and their engines processes of their own.
    """
    keys: dict[str, Any] = {key: tenant for tenant, key in TENANT_KEYS.items()}
    settings = {
        "dtype": "float32",
        "replicas": 2,
        "roles": {"prefill": 1, "split": "always"},
        # A busy machine may have learned that it would compute sooner what was handed over.
        "kv": {"redis_url": None, "load_or_recompute": "load", "load_deadline_s": 20.0},
        "engine": {
            "process": "process",
            "enforce_eager": True,
            "threads": 1,
            "max_num_seqs": 32,
            "extra_args": {"hf_token": HUB_TOKEN},
        },
        "http": {
            "api_keys": {**keys, OPERATOR_KEY: {"tenant": "operators", "admin": True}},
            "metrics_key": METRICS_KEY,
            "otlp_endpoint": f"http://crosskv:{COLLECTORS_PASSWORD}@127.0.0.1:9/v1/traces",
        },
        "tenants": {"alpha": {"weight": 2}, "gamma": {"requests_per_minute": 1000, "cpu_bytes": "64MiB"}},
    }

    def start(stack: contextlib.ExitStack) -> RunningServer:
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("CROSSKV_API_KEYS", json.dumps({FOREIGN_KEY: "gamma"}))
            environment.setenv("CROSSKV_SECRET", SERVER_SECRET)
            return stack.enter_context(started(tmp_path_factory.mktemp("keyed"), settings, key=OPERATOR_KEY))

    return whole_server.get("keyed", start)


@pytest.fixture(scope="module")
def process_world(whole_server: OneServer, tmp_path_factory: pytest.TempPathFactory) -> World:
    """A server whose engines have processes of their own, with a Redis of its own: for tests that are `long`."""
    settings = {
        "dtype": "float32",
        "replicas": 2,
        "engine": {"process": "process"},
        "http": {"max_ongoing_requests": 64, "max_queued_requests": 64},
        # What is lost is free after so long. And else Redis is not read where it is slow.
        "kv": {"lease_s": 8.0, "load_or_recompute": "load"},
    }
    folder = tmp_path_factory.mktemp("process")
    return whole_server.get("process", lambda stack: stack.enter_context(started_world(folder, settings)))


@pytest.fixture(scope="module")
def world(whole_server: OneServer, tmp_path_factory: pytest.TempPathFactory) -> World:
    """The server that most tests share: two replicas in float32, and Redis behind a proxy that can fail.

    Faults may destroy its parts: the next file waits until it is well.
    """
    http = {
        "max_ongoing_requests": 64,
        "max_queued_requests": 64,
        "model_aliases": ["claude-*", "gpt-*"],
    }
    # The demo model was not taught JSON, and fills what a grammar allows with whitespace.
    calls = {"tool_call_parser": "hermes", "json_whitespace": 1}
    engine = {"enforce_eager": True, "threads": 1, "max_num_seqs": 32, **calls}
    kv = {"lease_s": 8.0}  # what is lost is free after so long, and the tests wait for that
    routing = {"rebalance_streams": True}
    settings = {"dtype": "float32", "http": http, "engine": engine, "kv": kv, "routing": routing}

    def start(stack: contextlib.ExitStack) -> World:
        folder = tmp_path_factory.mktemp("world")
        found = stack.enter_context(started_world(folder, settings, redis_password="another"))
        FIRST_MINUTES[found.server.port] = look(found.server)
        found.redis.change_password()
        found.server.wait_until(lambda: found.server.health()["status"] == "ok", "Redis takes the server", 60.0)
        return found

    return whole_server.get("world", start)


@pytest.fixture(scope="module")
def without_redis(world: World) -> WithoutRedis:
    """The shared server's first minute, before Redis took its password."""
    return FIRST_MINUTES[world.server.port]


@pytest.fixture(scope="module")
def server(world: World) -> RunningServer:
    """The same server, for tests that leave its Redis alone."""
    return world.server


@pytest.fixture
def private_server(whole_server: OneServer, tmp_path: Path, request: pytest.FixtureRequest) -> RunningServer:
    """A server of the test's own, with the settings that it is parametrized with: for tests that are `long`."""
    return whole_server.get(request.node.nodeid, lambda stack: stack.enter_context(started(tmp_path, request.param)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Function) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that failed shows what its server has said last."""
    report = yield
    if report.failed:
        used = [item.funcargs[name] for name in SERVER_FIXTURES if name in item.funcargs]
        servers = [one.server if isinstance(one, World) else one for one in used[:1]]
        report.sections += [("what the server said last", server.said()) for server in servers]
    return report
