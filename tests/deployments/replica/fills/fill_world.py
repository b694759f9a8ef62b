"""A store and an engine for fills of chunks, as far as a test lets them, and prompts that bring chunks."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.protocol.extensions.blend_request import BlendRequest, PromptChunk
from deployments.protocol.wire import GenerateRequest
from deployments.replica import chunk_fill, idle_fills
from deployments.replica.chunk_fill import ChunkFill
from deployments.replica.fill_queue import ColdChunk
from kvmanager.extensions.blend.chunks import BlendTerms

BLOCK = 4
CHUNK = 300


class World:
    """A store, and an engine that computes one chunk at a time into it, as far as the test lets it."""

    def __init__(self, mode: str = "first") -> None:
        self.now = 0.0
        self.terms: dict[str, Any] = {"blend": BlendTerms(2, 6)}
        self.stored: dict[bytes, int] = {}
        self.asked: list[list[bytes]] = []
        self.computed: list[bytes] = []
        self.running = self.most_running = self.cut_off = 0
        self.goes = asyncio.Event()
        self.goes.set()
        self.stores = self.answers = True
        self.silent = 0
        """Questions that are not answered, from now on."""
        self.error: Exception | None = None
        self.fill = ChunkFill(mode, self, self.compute, BLOCK, clock=lambda: self.now)

    async def stored_chunks(self, sequences: Any) -> list[int] | None:
        self.asked.append([hashes[-1] for hashes in sequences if hashes])
        self.now += 0.01
        if self.silent:
            self.silent -= 1
            return None
        return [self.stored.get(hashes[-1], 0) if hashes else 0 for hashes in sequences] if self.answers else None

    async def compute(self, chunk: ColdChunk) -> None:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self.goes.wait()
            if self.error:
                raise self.error
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.cut_off += 1
            raise
        finally:
            self.running -= 1
        self.computed.append(chunk.key)
        if self.stores:
            self.stored[chunk.key] = len(chunk.block_hashes)

    async def prompt(self, request: GenerateRequest, blended: bool = True) -> bool:
        """One prompt on its way through a replica; whether chunks were filled first."""
        self.fill.begins()
        try:
            filled = await self.fill.before(request)
            self.fill.planned(request, filled, blended)
            found = self.stored.get(request.block_hashes[-1], 0) if request.block_hashes else 0
            if request.block_hashes:  # an engine stores a prompt before it has answered
                self.stored[request.block_hashes[-1]] = len(request.prompt_token_ids) // BLOCK
            self.fill.after(request, found * BLOCK)
            return filled
        finally:
            self.fill.ends()

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not holds():  # noqa: ASYNC110 - many things may make it true
                await asyncio.sleep(0.001)


def hashes(name: str, tokens: int = CHUNK) -> list[bytes]:
    return [f"{name}{number}".encode() for number in range(tokens // BLOCK)]


def key(name: str) -> bytes:
    return hashes(name)[-1]


def asked(*names: str, tenant: str = "", own: int = 0) -> GenerateRequest:
    chunks = [PromptChunk(10 + number * CHUNK, CHUNK, hashes(name)) for number, name in enumerate(names)]
    return GenerateRequest(
        request_id="r",
        prompt_token_ids=list(range(20 + len(names) * CHUNK)),
        sampling_params=SimpleNamespace(),  # type: ignore[arg-type]
        cache_salt="blended",
        block_hashes=[b"own"] if own else [],
        tenant=tenant,
        fidelity="blended",
        extras={"blend": BlendRequest(chunks, "exact", 0.15)},
    )


def run(test: Callable[[], Awaitable[None]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(idle_fills, "QUIET_S", 0.0)
    monkeypatch.setattr(chunk_fill, "STORED_POLL_S", 0.0)

    async def main() -> None:
        async with asyncio.timeout(30):
            await test()

    asyncio.run(main())


def by_hand(name: str, tenant: str = "t", request_id: str = "m") -> GenerateRequest:
    return replace(
        asked(), request_id=request_id, prompt_token_ids=list(range(CHUNK)), block_hashes=hashes(name), tenant=tenant,
        extras={}, fidelity="exact", cache_salt="exact", fills=True,
    )  # fmt: skip
