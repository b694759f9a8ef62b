"""A redis-server of our own that can be stopped, emptied and spoilt, and a proxy before it that can be slow or deaf."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import threading
import time
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import redis

from app.launch.ports import free_port
from deployments.redis_tier.server import find_redis_server

PASSWORD = "password-of-the-test-84d1b7"
"""It stands nowhere else."""
START_S = 20.0


class RedisProcess:
    """Keeps its data over `stop` and `start`; `client` is for the test's own use."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._folder = folder
        self._password = PASSWORD
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def client(self) -> redis.Redis:
        """A connection around the proxy."""
        return redis.Redis(port=self.port, password=self._password, socket_timeout=10)

    def start(self) -> None:
        """Return when it answers."""
        self._folder.mkdir(parents=True, exist_ok=True)
        options = f"--port {self.port} --bind 127.0.0.1 --requirepass {PASSWORD} --appendonly yes --appendfsync no"
        command = [str(find_redis_server()), *options.split(), "--save", "", "--dir", str(self._folder)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
        end = time.monotonic() + START_S
        while True:
            with contextlib.suppress(redis.RedisError):
                if self.client.ping():
                    return
            if time.monotonic() > end or self._process.poll() is not None:
                raise RuntimeError("redis-server did not start")
            time.sleep(0.05)

    def change_password(self, password: str = PASSWORD) -> None:
        """From now on new connections need this one; without an argument, the one that `Proxy.url` names."""
        self.client.config_set("requirepass", password)
        self._password = password

    def stop(self) -> None:
        """Kill it; connections are reset."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def start_empty(self) -> None:
        """Start it without what it held."""
        shutil.rmtree(self._folder)
        self.start()

    def segment_keys(self) -> list[bytes]:
        """The keys under which sealed segments lie."""
        client = self.client
        found = client.scan_iter(count=1000)
        return [key for key in found if client.type(key) == b"hash" and b":profile:" not in key]

    def segment_bytes(self) -> int:
        """What all sealed segments hold together, headers included."""
        client = self.client
        return sum(client.hstrlen(key, field) for key in self.segment_keys() for field in client.hkeys(key))


class Proxy:
    """Forwards TCP connections to Redis. `delay_s` delays every answer; `deaf` swallows everything."""

    def __init__(self, target_port: int) -> None:
        self.port = free_port()
        self.delay_s = 0.0
        self.deaf = False
        self._target_port = target_port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self._run(asyncio.start_server(self._serve, "127.0.0.1", self.port))

    @property
    def url(self) -> str:
        """For `kv.redis_url`."""
        return f"redis://:{PASSWORD}@127.0.0.1:{self.port}/0"

    def close(self) -> None:
        """End the thread; open connections end with it."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(5)

    def _run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked = [time.monotonic()]
        try:
            upstream_reader, upstream_writer = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.close()
            return
        forth = asyncio.create_task(self._pump(reader, upstream_writer, asked, answers=False))
        back = asyncio.create_task(self._pump(upstream_reader, writer, asked, answers=True))
        await asyncio.wait({forth, back}, return_when=asyncio.FIRST_COMPLETED)
        for task in (forth, back):
            task.cancel()
        for stream in (writer, upstream_writer):
            stream.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, asked: list[float], answers: bool
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(1 << 18):
                if self.deaf:
                    continue
                if not answers:
                    asked[0] = time.monotonic()
                elif self.delay_s:
                    await asyncio.sleep(max(0.0, asked[0] + self.delay_s - time.monotonic()))
                writer.write(data)
                await writer.drain()
