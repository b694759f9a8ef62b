"""How long a child that does not end is waited for."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from app.launch import server as module
from app.launch.descendants import Descendants
from app.launch.plan import Overrides, make_plan
from app.launch.server import Server
from tests.app.launch.stub_config import write_config

ENDS_WELL = """
import signal, sys
signal.signal(signal.SIGINT, lambda *_: sys.exit(0))
print("here", flush=True)
signal.pause()
"""
DEAF = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); print('here', flush=True); time.sleep(600)"


class OneProcess(Descendants):
    """In place of everything below this process, where other tests' Ray may be."""

    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self._process = process

    def note(self) -> None:
        pass

    def end(self, impatient: threading.Event) -> int:
        self._process.kill()
        return 1


@pytest.mark.parametrize("has_run", [False, True])
def test_a_child_that_lost_its_interrupt_is_waited_for_only_where_there_can_be_requests(
    tmp_path: Path, model_folder: Path, monkeypatch: pytest.MonkeyPatch, has_run: bool
) -> None:
    forever, at_once = 3600.0, 0.0
    monkeypatch.setattr(module, "STARTING_STOP_S", forever if has_run else at_once)
    monkeypatch.setattr(module, "RAY_STOP_S", at_once)
    child = subprocess.Popen([sys.executable, "-c", DEAF], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    drain = {"http": {"drain_s": at_once if has_run else forever}}
    server = Server(make_plan(write_config(tmp_path, model_folder, **drain), Overrides()))
    server._child, server._has_run, server._descendants = child, has_run, OneProcess(child)
    assert server.stop(threading.Event()) == 1
    assert server.exit_code == -signal.SIGKILL


class NotedStandIn:
    """A HAProxy in the place of Ray's; notes how the server had ended each time that it was to end."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self.exit_codes: list[int | None] = []

    def close(self) -> None:
        self.exit_codes.append(self._server.exit_code)


def test_the_haproxy_in_the_place_of_a_dead_one_carries_requests_until_the_server_has_ended(
    tmp_path: Path, model_folder: Path
) -> None:
    child = subprocess.Popen([sys.executable, "-c", ENDS_WELL], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.readline()
    server = Server(make_plan(write_config(tmp_path, model_folder), Overrides()))
    stand_in = NotedStandIn(server)
    server._child, server._has_run, server._descendants = child, True, OneProcess(child)
    server._stand_in = stand_in  # type: ignore[assignment]
    server.stop(threading.Event())
    assert stand_in.exit_codes == [0]
