"""Replicas and a store for chunks that are computed alone, as far as a test lets them, and prompts that bring any."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from fake_backend import FakeReplicas, say
from prometheus_client import CollectorRegistry
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams

from app.extensions.blend.precompute import precompute, turns
from app.extensions.blend.precompute.chunks import MissingChunk
from app.extensions.blend.precompute.precompute import Precompute
from app.metrics.ingress import IngressMetrics
from app.metrics.labels import FILLS
from app.openai.poison_registry import PoisonRegistry
from app.openai.prompt_keys import PromptKeys
from app.openai.retries import PromptSender
from deployments.protocol.extensions.blend_request import BlendRequest, PromptChunk
from deployments.protocol.wire import GenerateRequest
from kvmanager.segments.server_secret import ServerSecret
from load_tests.harness.patience import patience

BLOCK = 4
CHUNK = 300
SECRET = ServerSecret(b"the server's secret of 32 bytes.")


class World:
    """A store, and replicas that compute chunks into it, as far as the test lets them."""

    def __init__(self, mode: str = "first", replicas: int = 1, tenants: Sequence[str] = ()) -> None:
        self.now = 0.0
        self.stored: dict[bytes, int] = {}
        self.asked: list[list[bytes]] = []
        self.computed: list[bytes] = []
        self.running = self.most_running = self.cut_off = 0
        self.goes = asyncio.Event()
        self.goes.set()
        self.stores = self.answers = True
        self.silent = 0
        """Questions that are not answered, from now on."""
        self.error: Callable[[GenerateRequest], Exception | None] = lambda request: None
        self.told: dict[str, Any] | None = None
        """What a replica says in place of computing."""
        self.replicas = FakeReplicas(self.script, known_ranks=range(replicas))
        self.metrics = IngressMetrics(CollectorRegistry())
        self.registry = PoisonRegistry(600.0)
        sender = PromptSender(self.replicas, self.metrics, 3, self.registry)
        keys = PromptKeys(SECRET, bytes(32), BLOCK)
        self.precompute = Precompute(mode, sender, keys, self.stored_blocks, tenants, clock=lambda: self.now)

    async def stored_blocks(self, sequences: Any) -> list[int] | None:
        self.asked.append([hashes[-1] for hashes in sequences if hashes])
        self.now += 0.01
        if self.silent:
            self.silent -= 1
            return None
        return [self.stored.get(hashes[-1], 0) if hashes else 0 for hashes in sequences] if self.answers else None

    async def script(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        try:
            await self.goes.wait()
            if error := self.error(request):
                raise error
            await asyncio.sleep(0)
        except (asyncio.CancelledError, GeneratorExit):
            self.cut_off += 1
            raise
        finally:
            self.running -= 1
        output = say(request, [1], "", finished=True)
        if self.told is not None:
            output.kv_transfer_params = self.told
        else:
            self.computed.append(request.block_hashes[-1])
            if self.stores:
                self.stored[request.block_hashes[-1]] = len(request.block_hashes)
        yield output

    async def prompt(self, request: GenerateRequest, tenant: str = "", blended: bool = True) -> None:
        """One prompt on its way through the ingress. Raises what ends it."""
        ear = self.begin(request, tenant)
        failed = "error"
        try:
            await self.precompute.before(request, tenant)
            found = self.stored.get(request.block_hashes[-1], 0) * BLOCK if request.block_hashes else 0
            if request.block_hashes:  # an engine stores a prompt before it has answered
                self.stored[request.block_hashes[-1]] = len(request.prompt_token_ids) // BLOCK
            output = say(request, [1], "", finished=True)
            usage = {"device": found, "cpu": 100 if blended else 0, "redis": 0, "recomputed": 0}
            output.kv_transfer_params = {"crosskv": {**usage, **({"blended": 100} if blended else {})}}
            ear.hear(output, "a")
            failed = ""
        finally:
            ear.end(failed)

    def begin(self, request: GenerateRequest, tenant: str = "") -> Any:
        sent: Any = SimpleNamespace(request=request, context=SimpleNamespace(tenant=tenant))
        return self.precompute.begin(sent)

    def outcomes(self) -> dict[str, float]:
        """What was counted, without what was not."""
        counted = {outcome: self.metrics.chunk_fills.labels(outcome)._value.get() for outcome in FILLS}
        return {outcome: count for outcome, count in counted.items() if count}

    async def filled(self, count: int) -> None:
        """Wait until so many chunks have been computed to their end: before it a prompt interrupts the last one."""
        await self.until(lambda: self.outcomes().get("filled") == count)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(patience(60)):
            while not holds():  # noqa: ASYNC110 - many things may make it true
                await asyncio.sleep(0.001)


def hashes(name: str) -> list[bytes]:
    return [f"{name}{number}".encode() for number in range(CHUNK // BLOCK)]


def key(name: str) -> bytes:
    return hashes(name)[-1]


def tokens(name: str) -> list[int]:
    return [ord(name[0])] * CHUNK


def asked(*names: str, own: int = 0, request_id: str = "r") -> GenerateRequest:
    chunks = [PromptChunk(10 + number * CHUNK, CHUNK, hashes(name)) for number, name in enumerate(names)]
    return GenerateRequest(
        request_id=request_id,
        prompt_token_ids=[*range(10), *(token for name in names for token in tokens(name)), *range(10)],
        sampling_params=SamplingParams(),
        cache_salt="blended",
        block_hashes=[b"own"] if own else [],
        tenant="tag",
        fidelity="blended",
        extras={"blend": BlendRequest(chunks, "exact", 0.15)} if chunks else {},
    )


def chunk(name: str) -> MissingChunk:
    return MissingChunk(tokens(name), hashes(name), "exact", "tag")


def run(test: Callable[[], Awaitable[None]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "QUIET_S", 0.0)
    monkeypatch.setattr(precompute, "STORED_POLL_S", 0.0)
    monkeypatch.setattr(precompute, "LOOK_UP_PAUSES_S", (0.0, 0.0, 0.0))

    async def main() -> None:
        async with asyncio.timeout(patience(120)):
            await test()

    asyncio.run(main())
