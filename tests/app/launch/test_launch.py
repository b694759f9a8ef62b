"""The launcher around a stub application: it starts, says where, and leaves no process behind when stopped.

Tests ask one server, in any order, whose surroundings are odd in every way at once. Whichever test ends it has the next
one start another. A second server has a test's own surroundings.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import httpx
import psutil
import pytest

from app.launch.run_folder import find_launcher, run_folder
from configs.model_folder import PROJECT_ROOT
from load_tests.harness.patience import patience
from tests.app.launch.launched import (
    KILLED_LIMIT_S,
    START_LIMIT_S,
    STOP_LIMIT_S,
    Launched,
    assert_reached_by_its_user_alone,
    lasting_port,
)
from tests.app.launch.stub_config import write_config

pytestmark = pytest.mark.server

LAUNCHER = (sys.executable, "-m", "app.launch")
ODD = {
    "PYTHONOPTIMIZE": "2",
    "PYTHONWARNINGS": "error::DeprecationWarning",
    "PYTHONCOERCECLOCALE": "0",
    "LC_ALL": "C",
    # Python 3.13 imports nothing then below a path that is not ASCII; `make` takes the variable away.
    **({"PYTHONUTF8": "0"} if str(PROJECT_ROOT).isascii() else {}),
}
FEW_FILES = 'ulimit -Sn 1024; ulimit -Hn 1024; exec "$@"'


class Slot:
    """Keeps one running server in odd surroundings, with the configuration that `write` writes."""

    def __init__(self, folder: Path, model_folder: Path) -> None:
        long_tmpdir = folder / ("a" * 60) / ("b" * 60)
        long_tmpdir.mkdir(parents=True)
        odd = [f"{name}={value}" for name, value in (ODD | {"TMPDIR": str(long_tmpdir)}).items()]
        self._command = ["env", *odd, "sh", "-c", FEW_FILES, "sh", *LAUNCHER]
        self._folder = folder
        self._model_folder = model_folder
        self._started = 0
        self._port = 0
        self.server: Launched | None = None

    def write(self, **args: object) -> Path:
        config = write_config(self._folder, self._model_folder, port=self._port, **args)
        with config.open("a", encoding="utf-8") as file:
            file.write("# ünïcode 🙂\n")
        return config

    def running(self) -> Launched:
        if self.server is None or self.server.process.poll() is not None:
            self._started += 1
            self._port = lasting_port()
            self.server = Launched([*self._command, str(self.write())], self._folder / f"output-{self._started}")
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


STILLBORN = """
import os, sys
if any(word.endswith("default_worker.py") for word in sys.orig_argv):
    print("ImportError: stillborn", file=sys.stderr, flush=True)
    os._exit(1)
"""


def assert_fails(server: Launched, reason: str) -> None:
    """The start ends by itself, for this reason, and leaves no process."""
    while server.process.poll() is None:
        server.look()
        time.sleep(0.2)
    assert server.process.returncode == 1
    assert reason in server.text()
    assert "Traceback" not in server.text()
    assert server.left() == []


def until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + patience(START_LIMIT_S)
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def folder_of_ray(server: Launched) -> Path:
    (folder,) = {Path(folder).parent for folder in server.arguments("--temp-dir")}
    return folder


def under_way(pool: ThreadPoolExecutor, server: Launched, folder: Path) -> Future[httpx.Response]:
    """A request that the server has got and takes seconds for."""
    arrived = folder / "arrived"
    url = f"{server.url}/slow?arrived={arrived}"
    answer = pool.submit(httpx.get, url, timeout=patience(START_LIMIT_S), trust_env=False)
    until(arrived.exists)
    return answer


def test_it_is_its_users_and_ray_starts_a_dead_haproxy_again(server: Launched) -> None:
    assert f"curl -sN {server.url}/v1/chat/completions" in server.text()
    assert server.is_healthy()
    assert_reached_by_its_user_alone(server)
    below = psutil.Process(server.process.pid).children()
    (child,) = [one for one in below if "app.launch.serve_run" in one.cmdline()]
    assert os.getpgid(child.pid) != os.getpgid(server.process.pid), "Ctrl-C is for the launcher"
    assert os.getsid(child.pid) == os.getsid(server.process.pid), "and its server has no share of its own"

    (proxy,) = [process for process in server.left() if process.name() == "haproxy"]
    proxy.kill()
    server.wait_until("HAProxy is dead")
    until(server.answers)
    server.look()


def test_it_starts_with_few_files_a_long_tmpdir_ascii_and_switches_of_python(server: Launched) -> None:
    said = server.text()
    assert server.is_healthy()
    assert "Traceback" not in said
    assert "too long a path for a socket" in said
    assert "PYTHONOPTIMIZE" in said
    assert "may open 1024 files" in said


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


def test_a_restart_waits_for_requests_and_takes_the_configuration_as_it_is_then(
    server: Launched, slot: Slot, tmp_path: Path
) -> None:
    """SIGHUP ends every process but the launcher, and starts others."""
    launcher = find_launcher(server.port)
    assert launcher is not None
    assert launcher.pid == server.process.pid
    server.look()
    first, ray_folder, before = set(server.started), folder_of_ray(server), len(server.text())
    ailing = slot.write(served_model_name="renamed", builder="build_ailing", http={"log_format": "json"})

    with ThreadPoolExecutor() as pool:
        answer = under_way(pool, server, tmp_path)
        launcher.send_signal(signal.SIGHUP)
        assert answer.result().json() == {"answer": "whole"}
    server.wait_until("crosskv serves renamed")
    server.wait_until("cpu_tier: missing\n")

    said = server.text()[before:].rpartition("server.log")[2]
    expected = "redis: running with two tiers: [redis://cache:6379] refuses connections\ncpu_tier: missing\n"
    assert said.strip("\n") == expected.strip("\n"), "what is not well is named once it serves"
    assert [process for process in first if process.is_running()] == []
    assert not ray_folder.exists()
    assert len(server.left()) > 5
    assert find_launcher(server.port) == launcher
    assert server.is_healthy()
    chats = [httpx.post(f"{server.url}/v1/chat/completions", trust_env=False, timeout=patience(60)) for _ in range(48)]
    assert {chat.status_code for chat in chats} == {200}, "ready is ready for a burst of newcomers"
    logged = (run_folder(server.port) / "server.log").read_text().splitlines()
    for line in logged:
        assert json.loads(line).keys() >= {"time", "level", "message"}
    assert any("ray::" in line or "ServeController" in line for line in logged)
    assert ailing == slot.write(), "the configuration that later tests restart with"


def test_a_killed_launcher_takes_its_own_with_it(server: Launched) -> None:
    server.look()
    ray_folder = folder_of_ray(server)
    server.process.kill()
    server.process.wait()
    assert psutil.wait_procs(server.left(), patience(KILLED_LIMIT_S))[1] == []
    assert server.left() == []
    assert not ray_folder.exists()


@pytest.mark.long("tests/app/launch/test_launch.py::test_a_killed_launcher_takes_its_own_with_it")
@pytest.mark.long("tests/app/launch/test_haproxy.py::test_two_servers_of_one_machine_do_not_answer_for_each_other")
def test_of_two_servers_each_is_its_users_and_one_goes_on_when_the_others_launcher_is_killed(
    slot: Slot, launch: Callable[..., Launched], tmp_path: Path, model_folder: Path
) -> None:
    second = launch(write_config(tmp_path, model_folder))
    server = slot.running()  # both start at the same time
    second.wait_until("Ctrl-C stops it")
    for one in (server, second):
        assert one.is_healthy()
        assert_reached_by_its_user_alone(one)
    second.process.kill()
    second.process.wait()
    assert psutil.wait_procs(second.left(), patience(KILLED_LIMIT_S))[1] == []
    assert server.is_healthy()
    assert server.process.poll() is None


@pytest.mark.long("tests/app/launch/test_life.py::test_a_stop_that_is_asked_for_during_a_restart_wins")
@pytest.mark.long(
    "tests/app/launch/test_launch.py::test_a_restart_waits_for_requests_and_takes_the_configuration_as_it_is_then"
)
def test_a_request_that_is_under_way_gets_its_answer_and_a_stop_wins_over_a_restart(
    server: Launched, tmp_path: Path
) -> None:
    port = server.port
    starts, restarts = (server.text().count(said) for said in ("Ctrl-C stops it", "restarting: stopping"))
    ray_folder = folder_of_ray(server)
    with ThreadPoolExecutor() as pool:
        answer = under_way(pool, server, tmp_path)
        server.process.send_signal(signal.SIGHUP)
        until(lambda: server.text().count("restarting: stopping") > restarts)
        server.process.send_signal(signal.SIGTERM)
        assert answer.result().json() == {"answer": "whole"}
    server.assert_ends()
    assert server.text().count("Ctrl-C stops it") == starts
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
    assert_fails(launch(write_config(tmp_path, model_folder, builder=builder)), reason)


@pytest.mark.long(
    "tests/app/launch/test_life.py::test_a_start_whose_processes_end_at_birth_ends_after_a_minute_with_their_last_line"
)
@pytest.mark.long("tests/app/launch/test_life.py::test_the_last_line_of_a_worker_that_died_at_birth_is_found")
def test_a_start_whose_workers_die_at_birth_ends_with_their_last_line(
    launch: Callable[..., Launched], tmp_path: Path, model_folder: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(STILLBORN)
    command = ("env", f"PYTHONPATH={tmp_path}", *LAUNCHER)
    assert_fails(launch(write_config(tmp_path, model_folder), command=command), "ImportError: stillborn")


def test_a_wrong_setting_ends_at_once_with_its_sentence(
    launch: Callable[..., Launched], tmp_path: Path, model_folder: Path
) -> None:
    server = launch(write_config(tmp_path, model_folder, replica=3))
    assert server.process.wait(patience(START_LIMIT_S)) == 2
    assert server.text() == "replica: there is no such setting; did you mean 'replicas'?\n"


@pytest.mark.long(
    "tests/app/launch/test_stopping.py"
    "::test_a_child_that_lost_its_interrupt_is_waited_for_only_where_there_can_be_requests"
)
@pytest.mark.long("tests/app/launch/test_descendants.py::test_those_that_were_seen_are_ended_after_their_parent")
def test_a_stop_during_the_start_leaves_nothing(
    launch: Callable[..., Launched], tmp_path: Path, model_folder: Path
) -> None:
    server = launch(write_config(tmp_path, model_folder))

    def starts_ray() -> bool:
        server.look()
        return any(process.name() == "raylet" for process in server.left())

    until(starts_ray)
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(patience(STOP_LIMIT_S)) == 0, server.text()
    assert "Ctrl-C stops it" not in server.text()
    assert server.left() == []
