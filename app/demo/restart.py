"""The restart of the whole server, where its launcher runs on this machine: the one thing that HTTP cannot ask for."""

from __future__ import annotations

import contextlib
import ipaddress
import signal
import socket
import time
from collections.abc import Callable
from urllib.parse import urlsplit

import psutil

from app.demo.server import DemoServer
from app.launch.run_folder import find_launcher

STOP_DEADLINE_S = 90.0
"""The launcher first lets running requests end."""
START_DEADLINE_S = 600.0
"""A large model takes minutes to load."""
_POLL_S = 0.1


class Restart:
    """Use once. `unavailable` says why the server cannot be restarted; it is empty when it can."""

    def __init__(self, server: DemoServer, wanted: bool) -> None:
        self.took_s = 0.0
        self._server = server
        where = urlsplit(server.url)
        host, port = where.hostname or "", where.port or 80
        launcher = find_launcher(port) if wanted and _is_this_machine(host) else None
        self._launcher = launcher
        self.unavailable = ""
        if not wanted:
            self.unavailable = "--no-restart was given"
        elif launcher is None:
            self.unavailable = f"no `make serve` of this folder runs a server at {host}:{port}"

    def run(self, doing: Callable[[str], None]) -> str:
        """Signal the launcher and wait until the server is back, with all its replicas and with Redis.

        Returns:
            What went wrong; empty when the server is back.
        """
        assert self._launcher is not None
        started = time.monotonic()
        try:
            self._launcher.send_signal(signal.SIGHUP)
        except psutil.Error as error:
            return f"the launcher cannot be signalled: {error}"

        def step(text: str) -> bool:
            doing(f"{text} {time.monotonic() - started:.0f} s")
            time.sleep(_POLL_S)
            return self._launcher_lives()

        while self._server.parts() is not None:
            if not step("restarting the whole server: it ends") or time.monotonic() - started > STOP_DEADLINE_S:
                return "the launcher did not end the server after SIGHUP: its terminal says why"
        while missing := self._missing():
            if not step("restarting the whole server: it starts") or time.monotonic() - started > START_DEADLINE_S:
                return f"after its restart the server has no {missing}: the launcher's terminal says why"
        self.took_s = time.monotonic() - started
        return ""

    def _missing(self) -> str:
        """What is not back yet; empty: nothing."""
        parts = self._server.parts()
        if parts is None:
            return "answer"
        if not set(self._server.replicas) <= {int(rank) for rank in parts.get("replicas", {}).get("running", [])}:
            return "replicas"
        return "" if parts.get("redis", {}).get("state") == "ok" else "Redis"

    def _launcher_lives(self) -> bool:
        assert self._launcher is not None
        with contextlib.suppress(psutil.Error):
            return self._launcher.is_running() and self._launcher.status() != psutil.STATUS_ZOMBIE
        return False


def _is_this_machine(host: str) -> bool:
    try:
        addresses = {str(found[4][0]) for found in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    own = {found.address for interface in psutil.net_if_addrs().values() for found in interface}
    return any(address in own or ipaddress.ip_address(address).is_loopback for address in addresses)
