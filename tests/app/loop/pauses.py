"""How long an event loop stands still: the longest time between two turns of a task that does nothing else.

Counted is the shorter one of the time that has passed and the processor time that this process took meanwhile: a
machine that runs others stops the loop too, and is not what is tested.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass

from ingress_server import PromptServer

from load_tests.harness.patience import patience, until

LONGEST_S = 0.1
"""On a machine at rest, whatever a client sends."""

TRIES = 5


@dataclass
class LoopWatch:
    """The longest pause of a server's loop since it was last asked."""

    server: PromptServer
    longest_s: float = 0.0
    turns: int = 0

    def longest_while(self, request: bytes, enough_s: float = 0.0) -> tuple[float, bytes]:
        """The longest pause in seconds while the server answers one raw request, and the answer.

        The smallest of some tries, or the first one below `enough_s`: other work on the machine makes a pause longer.
        """
        tries = []
        for _ in range(TRIES):
            tries.append(self._longest_while(request))
            if tries[-1][0] < enough_s:
                break
        return min(tries, key=lambda found: found[0])

    def _longest_while(self, request: bytes) -> tuple[float, bytes]:
        with socket.create_connection(("127.0.0.1", self.server.port)) as connection:
            connection.settimeout(patience(120))
            self._settle()
            self.longest_s = 0.0
            connection.sendall(request)
            answer = b"".join(iter(lambda: connection.recv(1 << 20), b""))
        self._settle()  # the last pause is known when it has ended
        return self.longest_s, answer

    def _settle(self) -> None:
        seen = self.turns
        until(lambda: self.turns > seen + 1, "the loop turns")

    async def _watch(self) -> None:
        wall, spent = time.perf_counter(), time.process_time()
        while True:
            await asyncio.sleep(0.001)
            now, used = time.perf_counter(), time.process_time()
            self.longest_s = max(self.longest_s, min(now - wall, used - spent))
            self.turns += 1
            wall, spent = now, used


@contextlib.contextmanager
def watched(server: PromptServer) -> Iterator[LoopWatch]:
    """Watch the loop that `server` runs on."""
    watch = LoopWatch(server)
    task = asyncio.run_coroutine_threadsafe(watch._watch(), server._loop)
    try:
        yield watch
    finally:
        task.cancel()


def request_bytes(method: str, path: str, body: bytes = b"", headers: str = "") -> bytes:
    """One request, after whose answer the connection ends."""
    head = f"{method} {path} HTTP/1.1\r\nhost: 127.0.0.1\r\nconnection: close\r\ncontent-type: application/json\r\n"
    length = f"content-length: {len(body)}\r\n" if body else ""
    return f"{head}{length}{headers}\r\n".encode() + body


def status_of(answer: bytes) -> int:
    """Of an answer's first line."""
    return int(answer.split(b" ", 2)[1])
