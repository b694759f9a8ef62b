"""One real server for the folder: two vLLM replicas in float32, Ray Serve, started and ended as a user does."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
import yaml
from running_server import RunningServer

from configs.model_folder import PROJECT_ROOT

START_S = 180.0


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The server that most tests share: two replicas in float32."""
    http = {"debug_headers": True, "max_ongoing_requests": 64, "max_queued_requests": 64}
    with started(tmp_path_factory.mktemp("server"), {"dtype": "float32", "http": http}) as running:
        yield running


@pytest.fixture
def private_server(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[RunningServer]:
    """A server of the test's own, with the settings that it is parametrized with."""
    with started(tmp_path, request.param) as running:
        yield running


@contextlib.contextmanager
def started(folder: Path, settings: dict[str, Any]) -> Iterator[RunningServer]:
    """A server as `make serve` starts it, with these settings over those of serve_config.yaml."""
    # A copy: training may replace the model's files while the tests run.
    model_folder = folder / "demo"
    shutil.copytree(PROJECT_ROOT / "models" / "demo", model_folder)
    config = yaml.safe_load((PROJECT_ROOT / "serve_config.yaml").read_text())
    config["applications"][0]["args"] |= {"model": str(model_folder), **settings}
    path = folder / "serve_config.yaml"
    path.write_text(yaml.safe_dump(config))
    port = free_port()
    command = [sys.executable, "-m", "app.launch", str(path), "--port", str(port)]
    log = (path.parent / "launch.log").open("w+")
    child = subprocess.Popen(command, cwd=PROJECT_ROOT, stdout=log, stderr=subprocess.STDOUT, start_new_session=True)
    launcher = psutil.Process(child.pid)
    running = RunningServer(f"http://127.0.0.1:{port}", port, model_folder, launcher)
    try:
        wait_until_ready(child, running.url, Path(log.name))
        yield running
    finally:
        family = [launcher, *launcher.children(recursive=True)]
        child.send_signal(signal.SIGINT)
        child.wait(60)
        left = [process for process in family if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
        for process in left:
            process.kill()
        assert not left, f"Ctrl-C left processes behind: {left}"


def wait_until_ready(child: subprocess.Popen[Any], url: str, log: Path) -> None:
    end = time.monotonic() + START_S
    while True:
        try:
            if httpx.get(f"{url}/health", timeout=5).json()["status"] == "ok":
                return
        except (httpx.HTTPError, ValueError):
            pass
        if child.poll() is not None or time.monotonic() > end:
            pytest.fail(f"the server did not start:\n{log.read_text()[-4000:]}")
        time.sleep(0.5)


@pytest.fixture(scope="session", autouse=True)
def _no_proxy() -> None:
    os.environ["NO_PROXY"] = "127.0.0.1,localhost"
