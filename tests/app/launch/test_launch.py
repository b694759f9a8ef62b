"""The launcher around a stub application: it starts, says where, and leaves no process behind when stopped."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import re
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import psutil
import pytest

from app.launch.cluster import TOKEN_FILE
from app.launch.run_folder import find_launcher, run_folder
from configs.model_folder import PROJECT_ROOT
from tests.app.launch.stub_config import free_port, write_config

START_LIMIT_S = 180.0
STOP_LIMIT_S = 60.0

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]


class Launched:
    """A launcher of a test: its output as it grows, and every process that it was seen to have started."""

    def __init__(self, command: list[str], output: Path) -> None:
        self.output = output
        self.started: set[psutil.Process] = set()
        with output.open("wb") as out:
            self.process = subprocess.Popen(command, cwd=PROJECT_ROOT, stdout=out, stderr=out, start_new_session=True)

    def text(self) -> str:
        return self.output.read_text()

    def wait_until(self, text: str) -> None:
        deadline = time.monotonic() + START_LIMIT_S
        while text not in self.text():
            self.look()
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.2)
        self.look()

    def look(self) -> None:
        self.started.update(psutil.Process(self.process.pid).children(recursive=True))

    def listening(self) -> dict[tuple[str, int], str]:
        """Address and port of every socket that the server listens on, with the process's title."""
        found: dict[tuple[str, int], str] = {}
        for process in psutil.Process(self.process.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):
                for socket in process.net_connections(kind="tcp"):
                    if socket.status == psutil.CONN_LISTEN:
                        found[(socket.laddr.ip, socket.laddr.port)] = " ".join(process.cmdline())[:60]
        return found

    def arguments(self, name: str) -> set[str]:
        """Values of the argument `name` on the command lines of the server's processes."""
        words = [word for process in self.left() for word in process.cmdline() if word.startswith(f"{name}=")]
        return {word.partition("=")[2] for word in words}

    def left(self) -> list[psutil.Process]:
        return [p for p in self.started if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        for process in self.left():
            process.kill()


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Callable[..., Launched]]:
    launched: list[Launched] = []

    def launch(*arguments: str | Path, command: tuple[str, ...] = (sys.executable, "-m", "app.launch")) -> Launched:
        launched.append(Launched([*command, *map(str, arguments)], tmp_path / f"output-{len(launched)}"))
        return launched[-1]

    yield launch
    for one in launched:
        one.end()


def listening_beyond_loopback(server: Launched) -> dict[tuple[str, int], str]:
    def is_loopback(ip: str) -> bool:
        address = ipaddress.ip_address(ip)
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback

    return {address: title for address, title in server.listening().items() if not is_loopback(address[0])}


def replica_ports(server: Launched) -> list[int]:
    """Of the replica's process: Ray's own port, and the one that Serve opens in it."""
    ports = [port for (_, port), title in server.listening().items() if title.startswith("ray::ServeReplica")]
    assert len(ports) == 2
    return ports


def assert_needs_token(server: Launched, folder: Path) -> None:
    """Ray's control service answers those who know the token, and nobody else."""
    (address,) = server.arguments("--gcs-address")
    token = folder / TOKEN_FILE
    assert mode(token) == 0o600
    with grpc.insecure_channel(address) as channel:
        nodes = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetAllNodeInfo")
        for wrong in ((), (("authorization", "Bearer " + 64 * "0"),)):
            with pytest.raises(grpc.RpcError) as refused:
                nodes(b"", metadata=wrong, timeout=30)
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert nodes(b"", metadata=(("authorization", f"Bearer {token.read_text()}"),), timeout=30)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_two_servers_start_answer_and_leave_nothing_and_nobody_else_reaches_their_ray(
    launch: Callable[..., Launched], tmp_path: Path, model_folder: Path
) -> None:
    (tmp_path / "second").mkdir()
    servers = [launch(write_config(tmp_path, model_folder)), launch(write_config(tmp_path / "second", model_folder))]
    ray_folders: list[Path] = []
    for server in servers:
        server.wait_until("Ctrl-C stops it")
        address = re.search(r"http://127\.0\.0\.1:\d+", server.text())
        assert address is not None
        assert f"curl -sN {address[0]}/v1/chat/completions" in server.text()
        assert httpx.get(f"{address[0]}/health", trust_env=False).status_code == 200
        port = int(address[0].rpartition(":")[2])
        assert listening_beyond_loopback(server) == {}
        assert {port, *replica_ports(server)} <= {port for _, port in server.listening()}
        assert_needs_token(server, run_folder(port))
        (ray_folder,) = {Path(folder).parent for folder in server.arguments("--temp-dir")}
        assert [mode(folder) for folder in (run_folder(port), ray_folder)] == [0o700, 0o700]
        ray_folders.append(ray_folder)

    for server, number in zip(servers, (signal.SIGINT, signal.SIGTERM), strict=True):
        server.process.send_signal(number)
        assert server.process.wait(STOP_LIMIT_S) == 0, server.text()
        assert len(server.started) > 5
        assert server.left() == []
    assert [folder for folder in ray_folders if folder.exists()] == []


def test_sighup_restarts_everything_with_the_configuration_as_it_is_then(
    launch: Callable[..., Launched], tmp_path: Path, model_folder: Path
) -> None:
    port = free_port()
    server = launch(write_config(tmp_path, model_folder, port=port))
    server.wait_until("Ctrl-C stops it")
    launcher = find_launcher(port)
    assert launcher is not None
    assert launcher.pid == server.process.pid
    first = set(server.started)

    write_config(tmp_path, model_folder, port=port, served_model_name="renamed")
    launcher.send_signal(signal.SIGHUP)
    server.wait_until("crosskv serves renamed")
    assert [process for process in first if process.is_running()] == []
    assert len(server.left()) > 5
    assert find_launcher(port) == launcher
    assert httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200

    launcher.send_signal(signal.SIGINT)
    assert server.process.wait(STOP_LIMIT_S) == 0, server.text()
    assert server.left() == []
    assert "redis:" not in server.text()
    assert find_launcher(port) is None
    assert not (run_folder(port) / "launcher.pid").exists()


def test_a_configuration_that_cannot_work_restarts_nothing_and_says_why(
    launch: Callable[..., Launched], tmp_path: Path, model_folder: Path
) -> None:
    port = free_port()
    server = launch(write_config(tmp_path, model_folder, port=port))
    server.wait_until("Ctrl-C stops it")
    first = set(server.left())

    write_config(tmp_path, model_folder, port=port, replica=3)
    server.process.send_signal(signal.SIGHUP)
    server.wait_until("Not restarted: the server goes on with the settings that it has.")
    assert "replica: there is no such setting; did you mean 'replicas'?" in server.text()
    assert "stopping" not in server.text()
    assert first <= set(server.left())
    assert httpx.get(f"http://127.0.0.1:{port}/health", trust_env=False).status_code == 200

    write_config(tmp_path, model_folder, port=port)
    server.process.send_signal(signal.SIGHUP)
    server.wait_until("restarting: stopping")
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(STOP_LIMIT_S) == 0, server.text()
    assert server.text().count("Ctrl-C stops it") == 1
    assert server.left() == []


def test_parts_that_are_not_well_are_named_once_it_serves(
    launch: Callable[..., Launched], tmp_path: Path, model_folder: Path
) -> None:
    server = launch(write_config(tmp_path, model_folder, builder="build_ailing"))
    server.wait_until("Ctrl-C stops it")
    server.wait_until("cpu_tier: missing\n")
    said = server.text().split("server.log", 1)[1]
    expected = "redis: running with two tiers: [redis://cache:6379] refuses connections\ncpu_tier: missing\n"
    assert said.strip("\n") == expected.strip("\n")
    server.process.send_signal(signal.SIGINT)
    assert server.process.wait(STOP_LIMIT_S) == 0


def test_a_request_that_is_under_way_gets_its_answer_before_the_server_ends(
    launch: Callable[..., Launched], tmp_path: Path, model_folder: Path
) -> None:
    port, arrived = free_port(), tmp_path / "arrived"
    server = launch(write_config(tmp_path, model_folder, port=port))
    server.wait_until("Ctrl-C stops it")
    with ThreadPoolExecutor() as pool:
        url = f"http://127.0.0.1:{port}/slow?arrived={arrived}"
        answer = pool.submit(httpx.get, url, timeout=START_LIMIT_S, trust_env=False)
        deadline = time.monotonic() + START_LIMIT_S
        while not arrived.exists():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        server.process.send_signal(signal.SIGINT)
        assert answer.result().json() == {"answer": "whole"}
    assert server.process.wait(STOP_LIMIT_S) == 0, server.text()
    assert server.left() == []


def test_a_launcher_that_is_killed_takes_the_server_with_it(
    launch: Callable[..., Launched], tmp_path: Path, model_folder: Path
) -> None:
    server = launch(write_config(tmp_path, model_folder))
    server.wait_until("Ctrl-C stops it")
    server.process.kill()
    deadline = time.monotonic() + STOP_LIMIT_S
    while server.left() and time.monotonic() < deadline:
        time.sleep(0.2)
    assert server.left() == []


def test_an_application_that_cannot_be_built_ends_with_its_reason(
    launch: Callable[..., Launched], tmp_path: Path, model_folder: Path
) -> None:
    server = launch(write_config(tmp_path, model_folder, builder="build_broken"))
    while server.process.poll() is None:
        server.look()
        time.sleep(0.2)
    assert server.process.returncode == 1
    assert "RuntimeError: the stub cannot be built" in server.text()
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
