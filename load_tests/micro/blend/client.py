"""Asks one server over HTTP, and times first tokens and the gaps between a neighbour's tokens."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from load_tests.harness.answers import ChatAnswer, chat_request, error_message, events_async
from load_tests.harness.server import RunningServer, ServerError
from load_tests.micro.blend.prompts import Message

PATIENCE_S = 600.0
POLL_S = 0.01
EXACT: dict[str, Any] = {"fidelity": "exact"}


def blended(ratio: float) -> dict[str, Any]:
    """The request's `kv_cache` for blended KV."""
    return {"fidelity": "blended", "recompute_ratio": ratio}


@dataclass(frozen=True)
class Asked:
    """One answer: seconds to its first token, and the server's account of where its prompt's KV came from."""

    ttft_s: float
    prompt_tokens: int
    kv_cache: dict[str, Any]

    @property
    def blended_share(self) -> float:
        """Of the prompt's tokens, those that were reused behind other tokens than before."""
        return float(self.kv_cache.get("blended", 0)) / self.prompt_tokens


@dataclass
class Neighbour:
    """A stream that only decodes, and when each of its tokens came; seconds of this process's clock."""

    times: list[float] = field(default_factory=list)

    async def tokens(self, count: int) -> None:
        """Wait for so many more. Raises ServerError where they do not come."""
        wanted, end = len(self.times) + count, time.perf_counter() + PATIENCE_S
        while len(self.times) < wanted:
            if time.perf_counter() > end:
                raise ServerError("the neighbour's stream stands still")
            await asyncio.sleep(POLL_S)


def gaps_within(times: Sequence[float], begin: float, end: float) -> list[float]:
    """Gaps between neighbouring times of which some part lies between `begin` and `end`."""
    pairs = itertools.pairwise(times)
    return [after - before for before, after in pairs if after > begin and before < end]


class Client:
    """Of one server. Use within `opened`."""

    def __init__(self, server: RunningServer, model: str, http: httpx.AsyncClient) -> None:
        self._server, self._model, self._http = server, model, http

    @classmethod
    @contextlib.asynccontextmanager
    async def opened(cls, server: RunningServer, model: str) -> AsyncIterator[Client]:
        """With its connections."""
        async with httpx.AsyncClient(base_url=server.url, timeout=PATIENCE_S) as http:
            yield cls(server, model, http)

    async def ask(self, messages: Sequence[Message], kv_cache: dict[str, Any], max_tokens: int = 1) -> Asked:
        """One streamed answer. Raises ServerError where there is none."""
        answer = ChatAnswer()
        async for _ in self._stream(messages, kv_cache, max_tokens, answer):
            pass
        if answer.ttft_s is None or not answer.prompt_tokens:
            raise ServerError("an answer has no text, or no usage")
        return Asked(answer.ttft_s, answer.prompt_tokens, answer.usage.get("kv_cache") or {})

    async def rest(self) -> None:
        """Until everything that was computed is stored, and nothing runs."""
        await asyncio.to_thread(self._server.wait_until_idle, 60.0)

    @contextlib.asynccontextmanager
    async def neighbour(self, messages: Sequence[Message], max_tokens: int) -> AsyncIterator[Neighbour]:
        """A stream that is broken off on leaving; its prompt is exact."""
        found = Neighbour()

        async def read() -> None:
            answer = ChatAnswer()
            async for _ in self._stream(messages, EXACT, max_tokens, answer):
                if answer.pieces > len(found.times):
                    found.times.append(time.perf_counter())

        task = asyncio.create_task(read())
        try:
            yield found
            if task.done():
                task.result()
                raise ServerError("the neighbour's stream ended too early; its gaps are not those beside a whole blend")
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, httpx.HTTPError, ServerError):
                await task

    async def _stream(
        self, messages: Sequence[Message], kv_cache: dict[str, Any], max_tokens: int, answer: ChatAnswer
    ) -> AsyncIterator[None]:
        body = chat_request(self._model, messages, max_tokens) | {"ignore_eos": True, "kv_cache": kv_cache}
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise ServerError(error_message((await response.aread()).decode(errors="replace")))
            async for event in events_async(response):
                answer.take(event)
                yield
