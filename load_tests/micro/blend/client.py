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

from load_tests.harness.answers import Answer, chat_request
from load_tests.harness.client import CHAT, Client, ServerError
from load_tests.harness.server import RunningServer
from load_tests.micro.blend.prompts import Message

PATIENCE_S = 600.0
POLL_S = 0.01
EXACT: dict[str, Any] = {"fidelity": "exact"}


def blended(ratio: float) -> dict[str, Any]:
    """The request's `kv_cache` for blended KV."""
    return {"fidelity": "blended", "recompute_ratio": ratio}


def blended_share(answer: Answer) -> float:
    """Of the prompt's tokens, those that were reused behind other tokens than before."""
    return float(answer.kv_cache.get("blended", 0)) / (answer.prompt_tokens or 1)


@dataclass
class Neighbour:
    """A stream that only decodes, and when each of its tokens came; seconds of this process's clock."""

    times: list[float] = field(default_factory=list)

    async def tokens(self, count: int) -> None:
        """Wait for `count` more tokens. Raises ServerError where they do not come."""
        wanted, end = len(self.times) + count, time.perf_counter() + PATIENCE_S
        while len(self.times) < wanted:
            if time.perf_counter() > end:
                raise ServerError("the neighbour's stream stands still")
            await asyncio.sleep(POLL_S)


def gaps_within(times: Sequence[float], begin: float, end: float) -> list[float]:
    """Gaps between neighbouring times of which some part lies between `begin` and `end`."""
    pairs = itertools.pairwise(times)
    return [after - before for before, after in pairs if after > begin and before < end]


class Blends(Client):
    """Asks one server for blends and for prefills."""

    def __init__(self, server: RunningServer, model: str) -> None:
        super().__init__(server.url, model)
        self._server = server

    async def ask(self, messages: Sequence[Message], kv_cache: dict[str, Any], max_tokens: int = 1) -> Answer:
        """One streamed answer. Raises ServerError where there is none."""
        return await self.chat(self._body(messages, kv_cache, max_tokens))

    async def rest(self) -> None:
        """Until everything that was computed is stored, and nothing runs."""
        await asyncio.to_thread(self._server.wait_until_idle, 60.0)

    @contextlib.asynccontextmanager
    async def neighbour(self, messages: Sequence[Message], max_tokens: int) -> AsyncIterator[Neighbour]:
        """A stream that is broken off on leaving; its prompt is exact."""
        found = Neighbour()

        async def read() -> None:
            answer = Answer()
            async for event in self.events(CHAT, self._body(messages, EXACT, max_tokens)):
                answer.take(event)
                if answer.pieces > len(found.times):
                    found.times.append(time.perf_counter())

        task = asyncio.create_task(read())
        try:
            yield found
            if task.done():
                task.result()
                raise ServerError("the neighbour's stream ended too early; its gaps are not those during a whole blend")
        finally:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, httpx.HTTPError, ServerError):
                await task

    def _body(self, messages: Sequence[Message], kv_cache: dict[str, Any], max_tokens: int) -> dict[str, Any]:
        return chat_request(self.model, messages, max_tokens) | {"ignore_eos": True, "kv_cache": kv_cache}
