"""A backend whose replicas play back a script, for tests of the front alone."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind

from app.backend.protocols import Backend, HealthReport
from deployments.protocol.wire import KV_CACHE_USAGE, GenerateRequest
from kvmanager.routing.roles import Phase, fit_for
from kvmanager.scheduling.rebalancing import KVReport

Script = Callable[[GenerateRequest], AsyncIterator[RequestOutput]]


def say(request: GenerateRequest, tokens: Sequence[int], text: str, *, finished: bool) -> RequestOutput:
    """One output as a replica sends it: no prompt in it, and the KV usage in the last one."""
    prompt = len(request.prompt_token_ids)
    usage = {"device": min(prompt, 1), "cpu": 0, "redis": 0, "recomputed": max(prompt - 1, 0), "replica": "0"}
    logprobs = None
    if request.sampling_params.logprobs is not None:
        logprobs = [{token: Logprob(-0.5, 1, f"<{token}>")} for token in tokens]
    prompt_logprobs: Any = None
    if request.sampling_params.prompt_logprobs is not None:
        prompt_logprobs = [None, *({token: Logprob(-0.5, 1, "<>")} for token in request.prompt_token_ids[1:])]
    answer = CompletionOutput(0, text, list(tokens), None, logprobs, finish_reason="length" if finished else None)
    return RequestOutput(
        request.request_id,
        prompt=None,
        prompt_token_ids=None,
        prompt_logprobs=prompt_logprobs,
        outputs=[answer],
        finished=finished,
        num_cached_tokens=0,
        kv_transfer_params={KV_CACHE_USAGE: usage} if finished else None,
    )


async def speak(request: GenerateRequest) -> AsyncIterator[RequestOutput]:
    """Say " one two three", word by word in a stream, all at once otherwise; or what is left of it."""
    if request.sampling_params.output_kind != RequestOutputKind.DELTA:
        yield say(request, [10, 11, 12], " one two three", finished=True)
        return
    for number, word in list(enumerate([" one", " two", " three"]))[len(request.resumed_tokens) :]:
        await asyncio.sleep(0)
        yield say(request, [10 + number], word, finished=number == 2)


async def speak_for_ever(request: GenerateRequest) -> AsyncIterator[RequestOutput]:
    """One word, then one every 10 ms until nobody listens."""
    while True:
        yield say(request, [10], " word", finished=False)
        await asyncio.sleep(0.01)


async def think_for_ever(request: GenerateRequest) -> AsyncIterator[RequestOutput]:
    """Never a word."""
    await asyncio.Event().wait()
    yield say(request, [10], "", finished=True)


def fail_with(error: Exception, after_words: int = 0) -> Script:
    """Some words, then `error`."""

    async def script(request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        for _ in range(after_words):
            yield say(request, [10], " word", finished=False)
        raise error

    return script


def gone_at(*names: str, error: Exception, after_words: int = 0) -> Script:
    """On the replicas of these names some words, then `error`; `speak` on the others."""
    failing = fail_with(error, after_words)

    def script(request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        return (failing if request.progress.replica in names else speak)(request)

    return script


@dataclass
class FakeReplicas:
    """A `ReplicaHandle` that notes what it is asked, and chooses as the router does: what is not to be avoided."""

    script: Script = speak
    names: Sequence[str] = ("a", "b", "c")
    known_ranks: Collection[int] | None = None
    requests: list[GenerateRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    lacking: int | None = None
    """Of every prompt at the best decode replica; None: there are no roles."""
    roles: Mapping[str, str] = field(default_factory=dict)
    stopped: Collection[str] = ()
    """Names of those that are being stopped; they are not chosen."""
    kv: Mapping[str, KVReport] = field(default_factory=dict)
    _abort: dict[str, asyncio.Event] = field(default_factory=dict)

    def generate(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        self.requests.append(request)
        names = [name for name in self.names if name not in request.avoid and name not in self.stopped]
        names = sorted(fit_for(names, request.phase, self.roles), key=lambda name: name != request.prefer)
        request.progress.replica, request.progress.routed = (names or list(self.names))[0], time.monotonic()
        return self._until_aborted(request.request_id, self.script(request))

    async def _until_aborted(
        self, request_id: str, outputs: AsyncIterator[RequestOutput]
    ) -> AsyncGenerator[RequestOutput, None]:
        aborted = self._abort[request_id] = asyncio.Event()
        stop = asyncio.ensure_future(aborted.wait())
        following: asyncio.Future[Any] | None = None
        try:
            while True:
                following = asyncio.ensure_future(anext(outputs, None))
                await asyncio.wait({following, stop}, return_when=asyncio.FIRST_COMPLETED)
                if not following.done() or (output := following.result()) is None:
                    return
                yield output
        finally:
            stop.cancel()
            if following is not None:
                following.cancel()  # a script that nobody hears goes no further

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        if request_id in self._abort:
            self._abort[request_id].set()

    def only_one(self) -> bool:
        return len(self.names) < 2

    def rank_of(self, replica: str) -> int | None:
        return self.names.index(replica) if replica in self.names else None

    def named(self, rank: int) -> str | None:
        return self.names[rank] if rank < len(self.names) else None

    def why_not_to(self, replica: str, phase: Phase) -> str | None:
        if replica in self.stopped:
            return "it is being stopped"
        return None if replica in fit_for(self.names, phase, self.roles) else "its role is another"

    def kv_reports(self) -> Mapping[str, KVReport]:
        return self.kv

    def lacking_tokens(self, request: GenerateRequest) -> int | None:
        return self.lacking

    def none_left(self) -> bool:
        return self.known_ranks is not None and not self.known_ranks

    def ranks(self) -> Collection[int] | None:
        return self.known_ranks


def live_figures(seen: int, tenants: Sequence[str]) -> dict[str, Any]:
    """As the manager answers `live`: an empty cache of one CPU tier and one replica."""
    return {
        "epoch": 1, "last": max(seen, 0), "directives": [], "missed_directives": 0, "ranks": {"a": 0},
        "locations": [{"tier": "cpu", "holder": "node", "segments": 2, "bytes": 20, "budget_bytes": 100}],
        "nodes": 2, "ghosts": 0, "pins": 0, "device_blocks": {0: 3}, "prefill_s": None, "early_prefill_s": None,
        "tenants": {tag: {"tiers": {"cpu": {"segments": 1, "bytes": 10, "quota_bytes": None}}} for tag in tenants},
    }  # fmt: skip


@dataclass
class FakeControl:
    """A `ManagerControl` that answers what it was asked, or raises `error`."""

    error: Exception | None = None
    looked_up: list[list[bytes]] = field(default_factory=list)
    most_blocks: int | None = None
    """What the last lookup said of a model with states."""
    looked_at: list[tuple[Any, ...]] = field(default_factory=list)
    tree: dict[str, Any] | None = field(default_factory=lambda: {"nodes": [], "hidden": 0})
    alive: Callable[[int, Sequence[str]], dict[str, Any]] = live_figures
    cleared: list[list[str]] = field(default_factory=list)
    cleared_of: list[str | None] = field(default_factory=list)
    orders: list[tuple[Any, ...]] = field(default_factory=list)
    answer: dict[str, Any] = field(default_factory=lambda: {"outcome": "done", "blocks": 2})
    """To every order."""
    named: list[bytes] = field(default_factory=lambda: [b"1" * 32, b"2" * 32, b"3" * 32])
    """The blocks of every node."""
    stored: set[bytes] = field(default_factory=set)
    """The names of sequences that are stored."""
    obeys: asyncio.Event | None = None
    """Moves end when this is set; None: at once."""

    async def lookup(self, hashes: Sequence[bytes], most_blocks: int | None = None) -> dict[str, Any]:
        self._fail()
        self.looked_up.append(list(hashes))
        self.most_blocks = most_blocks
        segment = {
            "key": "00",
            "start": 0,
            "num_blocks": len(hashes),
            "end": len(hashes),
            "tiers": ["cpu"],
            "has_other_form": False,
            "kind": "request",
            "uses": 1,
        }
        found = {
            "blocks": len(hashes),
            "device": {"0": len(hashes), "1": 0},
            "cpu": 1,
            "redis": 2,
            "redis_in_any_form": 3,
            "segments": [segment, {**segment, "start": 8, "num_blocks": 4, "end": 12}],
        }
        if most_blocks is not None:
            found["landing"] = 1
            for one, landings in zip(found["segments"], ([{"end": 1, "tiers": ["cpu"]}], []), strict=True):
                one["landings"] = landings
        return found

    async def trie(self, tenant: str | None, root: bytes | None, depth: int, most: int) -> dict[str, Any] | None:
        self._fail()
        self.looked_at.append((tenant, root, depth, most))
        return self.tree

    async def live(self, seen: int, tenants: Sequence[str]) -> dict[str, Any]:
        self._fail()
        return self.alive(seen, tenants)

    async def stored_blocks(self, sequences: Sequence[Sequence[bytes]], timeout_s: float) -> list[int] | None:
        self._fail()
        del timeout_s
        return [len(hashes) if hashes and hashes[-1] in self.stored else 0 for hashes in sequences]

    async def stats(self) -> dict[str, Any]:
        self._fail()
        return {"nodes": 3}

    async def tenant_stats(self, tenant: str) -> dict[str, Any]:
        self._fail()
        return {"tag": tenant}

    async def clear(self, tiers: Collection[str], tenant: str | None) -> dict[str, Any]:
        self._fail()
        self.cleared.append(list(tiers))
        self.cleared_of.append(tenant)
        return {"cleared": list(tiers)}

    async def pin(self, hashes: Sequence[bytes], ttl_s: float, tenant: str) -> dict[str, Any]:
        return await self._order("pin", hashes, ttl_s, tenant)

    async def unpin(self, hashes: Sequence[bytes], tenant: str) -> dict[str, Any]:
        return await self._order("unpin", hashes, tenant)

    async def prefetch(self, hashes: Sequence[bytes], replica: int, deadline_s: float) -> dict[str, Any]:
        return await self._order("prefetch", hashes, replica, deadline_s)

    async def move(self, hashes: Sequence[bytes], source: int, target: int, deadline_s: float) -> dict[str, Any]:
        return await self._order("move", hashes, source, target, deadline_s)

    async def pin_node(self, node: bytes, ttl_s: float | None, whose: str | None) -> dict[str, Any]:
        return await self._order("pin_node", node, ttl_s, whose)

    async def hashes_to(self, node: bytes, whose: str | None) -> dict[str, Any]:
        found = await self._order("hashes_to", node, whose)
        return found if "refused" in found else {"hashes": self.named}

    async def would_clear(self, tiers: Collection[str], tenant: str | None) -> dict[str, Any]:
        return await self._order("would_clear", list(tiers), tenant)

    async def evict(self, hashes: Sequence[bytes], *asked: Any) -> dict[str, Any]:
        return await self._order("evict", hashes, *asked)

    async def would_move(self, hashes: Sequence[bytes], source: int, target: int) -> dict[str, Any]:
        return await self._order("would_move", hashes, source, target)

    async def compress(self, hashes: Sequence[bytes]) -> dict[str, Any]:
        return await self._order("compress", hashes)

    async def compressed(self, hashes: Sequence[bytes]) -> dict[str, Any]:
        return await self._order("compressed", hashes)

    async def _order(self, kind: str, hashes: Sequence[Any], *rest: Any) -> dict[str, Any]:
        self._fail()
        self.orders.append((kind, len(hashes), *rest))
        if self.obeys is not None and kind in ("prefetch", "move"):
            await self.obeys.wait()
        return dict(self.answer)

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error


async def healthy() -> HealthReport:
    return HealthReport(True, {"replicas": {"state": "ok", "running": [0]}})


def backend(replicas: Any, control: Any = None, **rest: Any) -> Backend:
    return Backend(replicas, control or FakeControl(), rest.pop("health", healthy), **rest)
