"""Questions and answers between a replica and its engine's process, over a pair of connected sockets.

Not vLLM's utility calls: those are answered between two steps only, and never once the engine has died. Here answers
come from an event loop of the engine's process, whatever the engine is doing, and a caller that waits for one when the
process ends gets an error. The sockets have no name: only a process that inherited them can speak, so messages are
pickled.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import pickle
import socket
import struct
from contextvars import Context
from typing import Any

from vllm.v1.engine.exceptions import EngineDeadError

logger = logging.getLogger(__name__)

_LENGTH = struct.Struct("<Q")


class Asker:
    """The replica's end. Belongs to the event loop that asks first."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._numbers = itertools.count()
        self._waiting: dict[int, asyncio.Future[Any]] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._opening = asyncio.Lock()
        self._ended = False

    async def ask(self, method: str, *arguments: Any) -> Any:
        """Return the method's answer, or raise its error. Raises EngineDeadError when the process has ended."""
        async with self._opening:
            if self._reading is None:
                reader, self._writer = await asyncio.open_connection(sock=self._socket)
                self._reading = asyncio.get_running_loop().create_task(self._read(reader), context=Context())
        if self._ended or self._writer is None:
            raise EngineDeadError()
        number = next(self._numbers)
        answer = self._waiting[number] = asyncio.get_running_loop().create_future()
        try:
            self._writer.write(_frame((number, method, arguments)))
            return await answer
        finally:
            self._waiting.pop(number, None)

    def close(self) -> None:
        """Hang up: the process learns that the replica is gone. From any thread."""
        self._ended = True
        reading, writer = self._reading, self._writer
        if reading is None or writer is None:
            self._socket.close()
            return

        def hang_up() -> None:
            reading.cancel()
            writer.close()

        with contextlib.suppress(RuntimeError):  # the loop is closed, and with it all that it read
            reading.get_loop().call_soon_threadsafe(hang_up)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        try:
            while True:
                number, error, value = await _message(reader)
                future = self._waiting.get(number)
                if future is None or future.done():
                    continue  # its caller no longer waits
                if error is None:
                    future.set_result(value)
                else:
                    future.set_exception(error)
        except (OSError, EOFError):
            pass
        finally:
            self._ended = True
            for future in self._waiting.values():
                if not future.done():
                    future.set_exception(EngineDeadError())


async def answer(connected: socket.socket, handler: Any) -> None:
    """The other end: have `handler`'s asynchronous methods answer, several at once, until the asker hangs up.

    However it ends, the asker hears of it. Raises what a message raises that cannot be unpickled.
    """
    reader, writer = await asyncio.open_connection(sock=connected)
    tasks: set[asyncio.Task[None]] = set()

    async def one(number: int, method: str, arguments: Any) -> None:
        try:
            frame = _frame((number, None, await getattr(handler, method)(*arguments)))
        except Exception as error:
            logger.debug("%s failed", method, exc_info=True)
            frame = _frame((number, _that_crosses(error), None))
        writer.write(frame)

    try:
        while True:
            task = asyncio.get_running_loop().create_task(one(*await _message(reader)))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
    except (OSError, EOFError):
        pass
    finally:
        writer.close()


def say(connected: socket.socket, value: Any) -> None:
    """The first message, before either side has an event loop on it. Blocks."""
    connected.sendall(_frame(_that_crosses(value) if isinstance(value, Exception) else value))


def hear(connected: socket.socket, timeout_s: float) -> Any:
    """Return the value that `say` sent; None: the other side has ended, or says nothing. Blocks."""
    connected.settimeout(timeout_s)
    try:
        (size,) = _LENGTH.unpack(_exactly(connected, _LENGTH.size))
        return pickle.loads(_exactly(connected, size))
    except (OSError, EOFError):
        return None
    finally:
        connected.setblocking(False)


def wait_for_end(connected: socket.socket, timeout_s: float) -> None:
    """Wait until the other side has hung up, for up to `timeout_s`. Blocks."""
    connected.settimeout(timeout_s)
    with contextlib.suppress(OSError):
        connected.recv(1)


def _exactly(connected: socket.socket, size: int) -> bytes:
    """Raises EOFError where the other side has ended."""
    received = bytearray()
    while len(received) < size:
        more = connected.recv(size - len(received))
        if not more:
            raise EOFError
        received += more
    return bytes(received)


def _frame(value: Any) -> bytes:
    body = pickle.dumps(value)
    return _LENGTH.pack(len(body)) + body


async def _message(reader: asyncio.StreamReader) -> Any:
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return pickle.loads(await reader.readexactly(size))


def _that_crosses(error: Exception) -> Exception:
    """The error, or its words where it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(repr(error))
    return error
