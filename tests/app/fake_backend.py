"""A backend whose replicas play back a script, for tests of the front alone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind

from app.replica_handle import Backend, HealthReport
from deployments.wire import GenerateRequest

Script = Callable[[GenerateRequest], AsyncIterator[RequestOutput]]


def output(
    request: GenerateRequest, tokens: Sequence[int], text: str, *, index: int = 0, finished: bool
) -> RequestOutput:
    """One output as a replica sends it: no prompt in it, and the KV usage in the last one."""
    prompt = len(request.prompt_token_ids)
    wants = request.sampling_params.logprobs
    logprobs = [{token: Logprob(-0.5, 1, f"<{token}>")} for token in tokens] if wants is not None else None
    usage = {"device": 1, "cpu": 0, "redis": 0, "recomputed": prompt - 1, "replica": "0"}
    return RequestOutput(
        request.request_id, None, None, None,
        [CompletionOutput(index, text, list(tokens), None, logprobs, finish_reason="length" if finished else None)],
        finished, num_cached_tokens=0, kv_transfer_params={"crosskv": usage} if finished else None,
    )  # fmt: skip


async def speak(
    request: GenerateRequest, words: Sequence[str] = (" one", " two", " three")
) -> AsyncIterator[RequestOutput]:
    """Say `words`, one token each: word by word in a stream, all at once otherwise."""
    if request.sampling_params.output_kind == RequestOutputKind.DELTA:
        for number, word in enumerate(words):
            await asyncio.sleep(0)
            yield output(request, [10 + number], word, finished=number == len(words) - 1)
    else:
        yield output(request, range(10, 10 + len(words)), "".join(words), finished=True)


@dataclass
class FakeReplicas:
    """A `ReplicaHandle` that notes what it is asked."""

    script: Script = speak
    known_ranks: Collection[int] | None = None
    requests: list[GenerateRequest] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)

    def generate(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        self.requests.append(request)
        return self.script(request)

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)

    def ranks(self) -> Collection[int] | None:
        return self.known_ranks


@dataclass
class FakeControl:
    """A `ControlPlane` that answers what it was asked, or raises `error`."""

    error: Exception | None = None
    cleared: list[list[str]] = field(default_factory=list)

    async def lookup(self, hashes: Sequence[bytes]) -> dict[str, Any]:
        self._fail()
        return {"blocks": len(hashes), "first": hashes[0].hex() if hashes else None}

    async def stats(self) -> dict[str, Any]:
        self._fail()
        return {"nodes": 3}

    async def clear(self, tiers: Collection[str]) -> dict[str, Any]:
        self._fail()
        self.cleared.append(list(tiers))
        return {"cleared": list(tiers)}

    def _fail(self) -> None:
        if self.error is not None:
            raise self.error


def backend(replicas: Any, control: Any = None, **rest: Any) -> Backend:
    async def healthy() -> HealthReport:
        return HealthReport(True, {"replica 0": {"state": "ok"}})

    return Backend(replicas, control or FakeControl(), rest.pop("health", healthy), **rest)
