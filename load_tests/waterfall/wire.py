"""A client of streamed chat answers, cheap compared with a small model: one connection, one request at a time.

HTTP libraries take a millisecond or two of the cores that the server needs; this takes a tenth of it.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping
from typing import Any

from load_tests.harness.answers import Answer
from load_tests.harness.client import ServerError

_LIMIT = 1 << 20


class Connection:
    """Kept open from one request to the next. On one event loop."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, path: str, body: Mapping[str, Any], headers: Mapping[str, str]) -> Answer:
        """One streamed answer, to its end. Raises ServerError for any status but 200."""
        if self._streams is None:
            self._streams = await asyncio.open_connection(self._host, self._port, limit=_LIMIT)
        reader, writer = self._streams
        content = json.dumps(body).encode()
        head = {"Host": f"{self._host}:{self._port}", "Content-Type": "application/json", **headers}
        lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in head.items())]
        writer.write("\r\n".join([*lines, f"Content-Length: {len(content)}", "", ""]).encode() + content)
        answer = Answer()
        status = await reader.readline()
        answer_head = (await reader.readuntil(b"\r\n\r\n")).lower()
        if b" 200 " not in status:
            self.close()
            raise ServerError(f"The server answered {status.decode().strip()}.")
        if b"transfer-encoding: chunked" not in answer_head:
            self.close()
            raise ServerError("The server did not answer with a stream.")
        return await self._read(reader, answer)

    async def _read(self, reader: asyncio.StreamReader, answer: Answer) -> Answer:
        rest = b""
        while size := int(await reader.readline(), 16):
            rest += (await reader.readexactly(size + 2))[:-2]
            *events, rest = rest.split(b"\n\n")
            for event in events:
                # Only two events of a stream are parsed: the first text's, and the usage.
                if answer.ttft_s is None and b'"content":' in event and text_of(event):
                    answer.ttft_s = time.perf_counter() - answer.sent
                elif b'"choices":[]' in event:
                    answer.usage = json.loads(event.removeprefix(b"data: "))["usage"]
        await reader.readline()
        answer.seconds = time.perf_counter() - answer.sent
        return answer

    def close(self) -> None:
        """End the connection."""
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


def text_of(event: bytes) -> bool:
    """Whether an event brings the first of the answer's text. A token may be an empty text; the role's event is not."""
    choices = json.loads(event.removeprefix(b"data: "))["choices"]
    delta = choices[0]["delta"] if choices else {}
    return bool(delta.get("content")) or ("role" not in delta and "content" in delta)
