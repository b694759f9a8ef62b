"""Sends a workload to any OpenAI-compatible server and times the answers as they stream in.

A request goes out when its time has come and the request that it follows has ended. Where `Workload.concurrency`
says how many may be under way, requests go out in the order of their numbers besides, none before an earlier one that
waits: the order is the workload's, not that in which answers end. An assistant's message whose content is None becomes
what the server answered.
Answers are greedy and, where the server takes vLLM's `ignore_eos`, exactly `max_tokens` long. A request that fails is
a `Measured` with an `error`; nothing is raised for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from load_tests.harness.answers import LONGEST_MESSAGE, ChatAnswer, chat_request, error_message, events_async
from load_tests.workloads.workload import Request, Workload

REQUEST_TIMEOUT_S = 600.0
CONNECT_TIMEOUT_S = 10.0
_VLLM_FIELDS: dict[str, Any] = {"ignore_eos": True}
"""What OpenAI's API does not know: the answer goes on until `max_tokens`."""
_REFUSED = (400, 422)


class ServerError(Exception):
    """A server did not start, did not answer, did not become what it had to, or left something behind.

    `str()` of it is one sentence for people, and the end of the server's log where there is one.
    """


@dataclass(frozen=True)
class Measured:
    """One request: `sent_s` and `ended_s` since the workload began, `ttft_s` and `tpot_s` since it was sent.

    `ttft_s` is the time to the first piece of the answer's text, `tpot_s` the mean time between further tokens (None
    where there is none). `cached_tokens` is None where the server does not say; `kv_cache` is crosskv's own account.
    """

    number: int
    returning: bool
    sent_s: float
    ttft_s: float | None
    tpot_s: float | None
    ended_s: float
    prompt_tokens: int
    output_tokens: int
    cached_tokens: int | None
    kv_cache: dict[str, Any] | None
    error: str | None


async def run_workload(
    base_url: str,
    model: str,
    workload: Workload,
    on_done: Callable[[Measured], None] | None = None,
    api_key: str | None = None,
    timeout_s: float = REQUEST_TIMEOUT_S,
    extra_body: Mapping[str, Any] | None = None,
    answers: dict[int, str] | None = None,
) -> list[Measured]:
    """Send all requests; what was measured comes in the order of their numbers.

    `base_url` without `/v1`; `extra_body` goes into every request; `answers` gets each answer's text by number.
    Raises ServerError when no server answers there, it wants another API key, or it does not have the model.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    timeout = httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S)
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(base_url=base_url, headers=headers, timeout=timeout, limits=limits) as http:
        await _require_model(http, base_url, model)
        run = _Run(
            http, model, workload, on_done, timeout_s, dict(extra_body or {}), {} if answers is None else answers
        )
        async with asyncio.TaskGroup() as tasks:
            sent = [tasks.create_task(run.send(request)) for request in workload.requests]
        return [task.result() for task in sent]


async def _require_model(http: httpx.AsyncClient, base_url: str, model: str) -> None:
    try:
        response = await http.get("/v1/models")
        listed = response.json() if response.status_code == 200 else {}
    except httpx.HTTPError as error:
        raise ServerError(f"No server answers at {base_url} ({error}); start one, such as with `make serve`.") from None
    except ValueError:
        listed = {}
    if response.status_code in (401, 403):
        raise ServerError(f"The server at {base_url} refuses the API key; give one that it knows.")
    known = [entry.get("id") for entry in listed.get("data", [])] if isinstance(listed, dict) else []
    if known and model not in known:
        raise ServerError(f"The server at {base_url} has no model {model!r}; it has {', '.join(map(str, known))}.")


class _Run:
    """One workload under way."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        model: str,
        workload: Workload,
        on_done: Callable[[Measured], None] | None,
        timeout_s: float,
        extra_body: dict[str, Any],
        answers: dict[int, str],
    ) -> None:
        self._http = http
        self._model = model
        self._requests = {request.number: request for request in workload.requests}
        self._on_done = on_done
        self._timeout_s = timeout_s
        self._extra = extra_body
        self._vllm_fields = _VLLM_FIELDS
        self._slots = asyncio.Semaphore(workload.concurrency) if workload.concurrency else None
        self._turn = asyncio.Lock()  # given in the order of asking, which is that of the requests
        self._ended = {request.number: asyncio.Event() for request in workload.requests}
        self._answers = answers
        self._began = time.perf_counter()

    async def send(self, request: Request) -> Measured:
        """Wait until it may go, send it, and read its answer."""
        await asyncio.sleep(request.at_s - self._now())
        async with self._allowed(request):
            measured = await self._measured(request)
        self._ended[request.number].set()
        if self._on_done:
            self._on_done(measured)
        return measured

    @contextlib.asynccontextmanager
    async def _allowed(self, request: Request) -> AsyncIterator[None]:
        if self._slots is None:
            await self._wait_for_predecessor(request)
            yield
            return
        async with self._turn:
            await self._wait_for_predecessor(request)
            await self._slots.acquire()
        try:
            yield
        finally:
            self._slots.release()

    async def _wait_for_predecessor(self, request: Request) -> None:
        if request.after is not None:
            await self._ended[request.after].wait()

    def _now(self) -> float:
        return time.perf_counter() - self._began

    async def _measured(self, request: Request) -> Measured:
        answer, error = ChatAnswer(), None
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._read(self._body(request), answer)
            if answer.ttft_s is None:
                error = "the answer has no text"
        except TimeoutError:
            error = f"not answered within {self._timeout_s:g} s"
        except (httpx.HTTPError, ValueError) as failure:
            error = f"{type(failure).__name__}: {failure}"[:LONGEST_MESSAGE]
        if error is None:
            self._answers[request.number] = answer.text
        sent_s = answer.sent - self._began
        return Measured(
            number=request.number,
            returning=request.returning,
            sent_s=sent_s,
            ttft_s=answer.ttft_s,
            tpot_s=answer.tpot_s,
            ended_s=self._now(),
            prompt_tokens=answer.prompt_tokens or 0,
            output_tokens=answer.output_tokens,
            cached_tokens=answer.cached_tokens,
            kv_cache=answer.usage.get("kv_cache"),
            error=error,
        )

    def _body(self, request: Request) -> dict[str, Any]:
        """Raises ValueError when an answer that the prompt goes on from never came."""
        messages: list[dict[str, str]] = []
        before = request
        for message in reversed(request.messages):
            content = message.content
            if content is None:
                if before.after is None or before.after not in self._answers:
                    raise ValueError("the request whose answer it goes on from has failed")
                content = self._answers[before.after]
                before = self._requests[before.after]
            messages.append({"role": message.role, "content": content})
        return chat_request(self._model, messages[::-1], request.max_tokens) | self._extra

    async def _read(self, body: dict[str, Any], answer: ChatAnswer) -> None:
        fields = self._vllm_fields
        try:
            await self._read_events(body | fields, answer)
        except _RefusedError:
            if not fields:
                raise
            # A server that takes no fields but OpenAI's: from now on without them.
            await self._read_events(body, answer)
            self._vllm_fields = {}

    async def _read_events(self, body: dict[str, Any], answer: ChatAnswer) -> None:
        async with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                text = (await response.aread()).decode(errors="replace")
                kind = _RefusedError if response.status_code in _REFUSED else _FailedError
                raise kind(f"{response.status_code} {error_message(text)}")
            async for event in events_async(response):
                answer.take(event)


class _FailedError(ValueError):
    """The server answered with another status than 200."""


class _RefusedError(_FailedError):
    """It says that the request is wrong."""


def errors_by_text(measured: Sequence[Measured]) -> dict[str, int]:
    """How often each error occurred, the most frequent first."""
    counts: dict[str, int] = {}
    for one in measured:
        if one.error is not None:
            counts[one.error] = counts.get(one.error, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))
