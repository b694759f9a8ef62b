"""The launcher around a stub application: it starts, says where, and leaves no process behind when stopped.

Most tests ask one server, in any order. Whoever ends it has the next test start another.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from app.launch.ports import free_port
from app.launch.run_folder import find_launcher, run_folder
from tests.app.launch.launched import (
    KILLED_LIMIT_S,
    START_LIMIT_S,
    STOP_LIMIT_S,
    Launched,
    assert_reached_by_its_user_alone,
)
from tests.app.launch.stub_config import write_config

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

LAUNCHER = (sys.executable, "-m", "app.launch")


class Slot:
    """Keeps one running server, with the configuration that `write` writes."""

    def __init__(self, folder: Path, model_folder: Path) -> None:
        self._folder = folder
        self._model_folder = model_folder
        self._started = 0
        self._port = 0
        self.server: Launched | None = None

    def write(self, **args: object) -> Path:
        return write_config(self._folder, self._model_folder, port=self._port, **args)

    def running(self) -> Launched:
        if self.server is None or self.server.process.poll() is not None:
            self._started += 1
            self._port = free_port()
            self.server = Launched([*LAUNCHER, str(self.write())], self._folder / f"output-{self._started}")
            self.server.wait_until("Ctrl-C stops it")
        return self.server


@pytest.fixture(scope="module")
def slot(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Iterator[Slot]:
    slot = Slot(tmp_path_factory.mktemp("launch"), model_folder)
    yield slot
    if slot.server is not None:
        slot.server.end()


@pytest.fixture
def server(slot: Slot) -> Launched:
    return slot.running()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    launched: list[Launched] = []

    def launch(*arguments: str | Path, command: tuple[str, ...] = LAUNCHER) -> Launched:
        launched.append(Launched([*command, *map(str, arguments)], tmp_path / f"output-{len(launched)}"))
        return launched[-1]

    yield launch
    for one in launched:
        one.end()


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_two_servers_are_reached_by_their_users_alone_and_a_killed_launcher_takes_its_own_with_it(
    server: Launched, launch: Callable[..., Launched], tmp_path: Path, model_folder: Path
) -> None:
    second = launch(write_config(tmp_path, model_folder, builder="build_ailing", http={"log_format": "json"}))
    second.wait_until("Ctrl-C stops it")
    second.wait_until("cpu_tier: missing\n")
    said = second.text().split("server.log", 1)[1]
    expected = "redis: running with two tiers: [redis://cache:6379] refuses connections\ncpu_tier: missing\n"
    assert said.strip("\n") == expected.strip("\n"), "what is not well is named once it serves"

    for one in (server, second):
        assert f"curl -sN {one.url}/v1/chat/completions" in one.text()
        assert one.is_healthy()
    assert_reached_by_its_user_alone(server)
    assert_reached_by_its_user_alone(second)

    (proxy,) = [process for process in second.left() if process.name() == "haproxy"]
    proxy.kill()
    second.wait_until("HAProxy is dead")
    until(second.answers)
    second.look()

    logged = (run_folder(second.port) / "server.log").read_text().splitlines()
    second.process.kill()
    second.process.wait()
    assert psutil.wait_procs(second.left(), KILLED_LIMIT_S)[1] == []
    assert second.left() == []
    for line in logged:
        assert json.loads(line).keys() >= {"time", "level", "message"}
    assert any("ray::" in line or "ServeController" in line for line in logged)
    assert server.is_healthy()


def test_a_configuration_that_cannot_work_restarts_nothing_and_says_why(server: Launched, slot: Slot) -> None:
    first, before = set(server.left()), len(server.text())

    slot.write(replica=3)
    server.process.send_signal(signal.SIGHUP)
    server.wait_until("Not restarted: the server goes on with the settings that it has.")
    slot.write()

    assert "replica: there is no such setting; did you mean 'replicas'?" in server.text()[before:]
    assert "stopping" not in server.text()[before:]
    assert first <= set(server.left())
    assert server.is_healthy()


def test_sighup_restarts_everything_with_the_configuration_as_it_is_then(server: Launched, slot: Slot) -> None:
    launcher = find_launcher(server.port)
    assert launcher is not None
    assert launcher.pid == server.process.pid
    first = set(server.started)

    slot.write(served_model_name="renamed")
    launcher.send_signal(signal.SIGHUP)
    server.wait_until("crosskv serves renamed")

    assert [process for process in first if process.is_running()] == []
    assert len(server.left()) > 5
    assert find_launcher(server.port) == launcher
    assert server.is_healthy()


def test_a_request_that_is_under_way_gets_its_answer_and_a_stop_wins_over_a_restart(
    server: Launched, tmp_path: Path
) -> None:
    port, arrived = server.port, tmp_path / "arrived"
    starts, restarts = (server.text().count(said) for said in ("Ctrl-C stops it", "restarting: stopping"))
    (ray_folder,) = {Path(folder).parent for folder in server.arguments("--temp-dir")}
    with ThreadPoolExecutor() as pool:
        url = f"{server.url}/slow?arrived={arrived}"
        answer = pool.submit(httpx.get, url, timeout=START_LIMIT_S, trust_env=False)
        until(arrived.exists)
        server.process.send_signal(signal.SIGHUP)
        until(lambda: server.text().count("restarting: stopping") > restarts)
        server.process.send_signal(signal.SIGTERM)
        assert answer.result().json() == {"answer": "whole"}
    server.assert_ends()
    assert server.text().count("Ctrl-C stops it") == starts
    assert "redis:" not in server.text()
    assert find_launcher(port) is None
    assert not (run_folder(port) / "launcher.pid").exists()
    assert not ray_folder.exists()


@pytest.mark.long(
    "tests/app/launch/test_life.py::test_a_server_that_ended_by_itself_says_its_last_words_before_it_is_tidied_up"
)
@pytest.mark.long(
    "tests/app/launch/test_life.py::test_a_part_that_fails_twice_in_the_same_words_ends_the_start_with_them"
)
@pytest.mark.parametrize(
    ("builder", "reason"),
    [
        ("build_broken", "RuntimeError: the stub cannot be built"),
        ("build_failing", "Failing: AssertionError: the stub needs at least one group"),
    ],
)
def test_an_application_that_cannot_start_ends_with_its_reason(
    launch: Callable[..., Launched], tmp_path: Path, model_folder: Path, builder: str, reason: str
) -> None:
    server = launch(write_config(tmp_path, model_folder, builder=builder))
    while server.process.poll() is None:
        server.look()
        time.sleep(0.2)
    assert server.process.returncode == 1
    assert reason in server.text()
    assert "Traceback" not in server.text()
    assert server.left() == []


def test_a_wrong_setting_ends_at_once_with_its_sentence(
    launch: Callable[..., Launched], tmp_path: Path, model_folder: Path
) -> None:
    server = launch(write_config(tmp_path, model_folder, replica=3))
    assert server.process.wait(START_LIMIT_S) == 2
    assert server.text() == "replica: there is no such setting; did you mean 'replicas'?\n"


def test_an_interrupt_sent_to_make_alone_stops_the_server(
    launch: Callable[..., Launched], tmp_path: Path, model_folder: Path
) -> None:
    makefile = tmp_path / "Makefile"
    config = write_config(tmp_path, model_folder)
    makefile.write_text(f"serve:\n\t@exec {sys.executable} -m app.launch {config}\n")
    make = launch(command=("make", "-f", str(makefile), "serve"))
    make.wait_until("starting Ray")
    os.kill(make.process.pid, signal.SIGINT)
    make.process.wait(STOP_LIMIT_S)
    assert make.left() == []
