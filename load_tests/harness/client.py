"""Asks a server, and times the answers as they stream in: one by one, or a whole workload.

Of a workload a request goes out when its time has come and the request that it follows has ended. Where
`Workload.concurrency` says how many may be under way, requests also go out in the order of their numbers, none
before an earlier one that waits: the order is the workload's, not that in which answers end. An assistant's message
whose content is None becomes what the server answered.
Answers of a workload are greedy and, by vLLM's `ignore_eos`, exactly `max_tokens` long. A request that fails is a
`Measured` with an `error`; nothing is raised for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import httpx

from load_tests.harness.answers import LONGEST_MESSAGE, Answer, chat_request, error_message, events_async
from load_tests.workloads.workload import Request, Workload

REQUEST_TIMEOUT_S = 600.0
CONNECT_TIMEOUT_S = 10.0
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class ServerError(Exception):
    """A server did not start, did not answer, did not become what it had to, or left something behind.

    `str()` of it is one sentence for people, and the end of the server's log where there is one.
    """


class StatusError(ServerError):
    """The server answered with another status than 200."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"{status} {error_message(text)}")
        self.status = status


class Client:
    """Asks one server about one model. On one event loop; a context, whose end closes the connections.

    `key`: of every request. All methods raise StatusError, httpx.HTTPError, and of streams StreamError.
    """

    def __init__(
        self,
        url: str,
        model: str,
        key: str | None = None,
        timeout_s: float = REQUEST_TIMEOUT_S,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`transport`: in place of the network."""
        self.model = model
        self.http = httpx.AsyncClient(
            base_url=url,
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=httpx.Timeout(timeout_s, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None),
            trust_env=False,  # no proxy of the environment is for this machine's own address
            transport=transport,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    async def events(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events of a stream."""
        async with self.http.stream("POST", path, json=body, headers=headers) as response:
            if response.status_code != 200:
                raise StatusError(response.status_code, (await response.aread()).decode(errors="replace"))
            async for event in events_async(response):
                yield event

    def completion(self, prompt: Sequence[int], max_tokens: int, **fields: Any) -> dict[str, Any]:
        """Return the body that asks for exactly `max_tokens` greedy tokens behind these."""
        same = {"model": self.model, "temperature": 0, "ignore_eos": True}
        return {**same, "prompt": prompt, "max_tokens": max_tokens, **fields}

    async def post(
        self, path: str, body: Mapping[str, Any], headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        """Return the JSON of an answer that is no stream."""
        response = await self.http.post(path, json=body, headers=headers)
        if not response.is_success:
            raise StatusError(response.status_code, response.text)
        found: dict[str, Any] = response.json()
        return found


def pinned(replica: int | None) -> dict[str, str]:
    """Return the header that names a replica, or none."""
    return {} if replica is None else {"X-CrossKV-Replica": str(replica)}


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
    timeout_s: float = REQUEST_TIMEOUT_S,
    extra_body: Mapping[str, Any] | None = None,
) -> list[Measured]:
    """Send all requests; what was measured comes in the order of their numbers.

    `base_url` without `/v1`; `extra_body` goes into every request.
    """
    async with Client(base_url, model, timeout_s=timeout_s) as client:
        run = _Run(client, workload, on_done, timeout_s, dict(extra_body or {}))
        async with asyncio.TaskGroup() as tasks:
            sent = [tasks.create_task(run.send(request)) for request in workload.requests]
        return [task.result() for task in sent]


class _Run:
    """One workload under way."""

    def __init__(
        self,
        client: Client,
        workload: Workload,
        on_done: Callable[[Measured], None] | None,
        timeout_s: float,
        extra_body: dict[str, Any],
    ) -> None:
        self._client = client
        self._requests = {request.number: request for request in workload.requests}
        self._on_done = on_done
        self._timeout_s = timeout_s
        self._extra = {"ignore_eos": True, **extra_body}
        self._slots = asyncio.Semaphore(workload.concurrency) if workload.concurrency else None
        self._turn = asyncio.Lock()  # given in the order of asking, which is that of the requests
        self._ended = {request.number: asyncio.Event() for request in workload.requests}
        self._answers: dict[int, str] = {}
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
        answer, error = Answer(), None
        try:
            async with asyncio.timeout(self._timeout_s):
                async for event in self._client.events(CHAT, self._body(request)):
                    answer.take(event)
            if answer.ttft_s is None:
                error = "the answer has no text"
        except TimeoutError:
            error = f"not answered within {self._timeout_s:g} s"
        except (ServerError, httpx.HTTPError, ValueError) as failure:
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
        return chat_request(self._client.model, messages[::-1], request.max_tokens) | self._extra
