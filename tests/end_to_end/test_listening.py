"""On one machine no process of the server listens beyond loopback."""

from __future__ import annotations

import contextlib
import ipaddress

import psutil
import pytest

from load_tests.harness.server import RunningServer

pytestmark = pytest.mark.server


def listening(server: RunningServer) -> dict[tuple[str, int], str]:
    """Address and port of every TCP socket that the server listens on, with the process's title."""
    found: dict[tuple[str, int], str] = {}
    for process in server.launcher.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            title = " ".join(process.cmdline())
            for socket in process.net_connections(kind="tcp"):
                if socket.status == psutil.CONN_LISTEN:
                    found[(socket.laddr.ip.removeprefix("::ffff:"), socket.laddr.port)] = title
    return found


def test_every_listening_socket_is_bound_to_loopback(server: RunningServer) -> None:
    sockets = listening(server)
    assert {a: title for a, title in sockets.items() if not ipaddress.ip_address(a[0]).is_loopback} == {}
    assert server.port in {port for _, port in sockets}
    for part in ("gcs_server", "raylet", "ServeController", "ServeReplica:crosskv:Replica", "KVManager", "CPUTier"):
        assert any(part in title for title in sockets.values()), part
