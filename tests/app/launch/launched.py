"""A launcher that a test started: its output as it grows, and every process that it was seen to have started."""

from __future__ import annotations

import contextlib
import ipaddress
import random
import re
import socket
import stat
import subprocess
import time
from pathlib import Path

import grpc
import httpx
import psutil
import pytest

from app.launch.cluster import TOKEN_FILE
from app.launch.run_folder import run_folder
from configs.model_folder import PROJECT_ROOT
from load_tests.harness.patience import patience

START_LIMIT_S = 180.0
STOP_LIMIT_S = 60.0
KILLED_LIMIT_S = 240.0
"""An agent of Ray's that finds its raylet gone tells GCS, and waits a minute and more for one that is gone too."""
LASTING = range(32_001, 32_768)
"""Ports that `free_port` never gives, and that Linux gives to no connection."""


def lasting_port() -> int:
    """Return a port for a server that is restarted: nothing of another test takes it while no process listens on it."""
    for port in random.SystemRandom().sample(LASTING, len(LASTING)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise OSError("no port is free")


class Launched:
    """See the module's docstring; `url` is known once it serves."""

    def __init__(self, command: list[str], output: Path) -> None:
        self.output = output
        self.started: set[psutil.Process] = set()
        with output.open("wb") as out:
            self.process = subprocess.Popen(command, cwd=PROJECT_ROOT, stdout=out, stderr=out, process_group=0)

    @property
    def url(self) -> str:
        """Where it serves."""
        found = re.search(r"http://127\.0\.0\.1:\d+", self.text())
        assert found is not None
        return found[0]

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    def is_healthy(self) -> bool:
        return httpx.get(f"{self.url}/health", trust_env=False, timeout=patience(60)).status_code == 200

    def answers(self) -> bool:
        """Whether it is healthy, or is not: where nothing listens, it is not."""
        with contextlib.suppress(httpx.TransportError):
            return self.is_healthy()
        return False

    def text(self) -> str:
        return self.output.read_text()

    def wait_until(self, text: str) -> None:
        deadline = time.monotonic() + patience(START_LIMIT_S)
        while text not in self.text():
            self.look()
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < deadline, self.text()
            time.sleep(0.2)
        self.look()

    def assert_ends(self) -> None:
        """It ends well, and with it every process that it has started."""
        assert self.process.wait(patience(STOP_LIMIT_S)) == 0, self.text()
        assert len(self.started) > 5
        assert self.left() == []

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


def listening_beyond_loopback(server: Launched) -> dict[tuple[str, int], str]:
    def is_loopback(ip: str) -> bool:
        address = ipaddress.ip_address(ip)
        return (getattr(address, "ipv4_mapped", None) or address).is_loopback

    return {address: title for address, title in server.listening().items() if not is_loopback(address[0])}


def assert_reached_by_its_user_alone(server: Launched) -> Path:
    """It listens on loopback, its folders are private, and its Ray wants a token. Returns Ray's folder."""
    assert listening_beyond_loopback(server) == {}
    assert {server.port, *replica_ports(server)} <= {port for _, port in server.listening()}
    assert_needs_token(server, run_folder(server.port))
    (ray_folder,) = {Path(folder).parent for folder in server.arguments("--temp-dir")}
    assert [mode(folder) for folder in (run_folder(server.port), ray_folder)] == [0o700, 0o700]
    return ray_folder


def replica_ports(server: Launched) -> list[int]:
    """Of the ingress's process: Ray's own port, and those that Serve opens in it for calls and for HAProxy."""
    ports = [port for (_, port), title in server.listening().items() if title.startswith("ray::ServeReplica")]
    assert len(ports) == 3
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
                nodes(b"", metadata=wrong, timeout=patience(30))
            assert refused.value.code() is grpc.StatusCode.UNAUTHENTICATED
        assert nodes(b"", metadata=(("authorization", f"Bearer {token.read_text()}"),), timeout=patience(30))


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)
