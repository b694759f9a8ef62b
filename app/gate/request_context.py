"""Data of one HTTP request other than its body, from the ASGI middleware to the engine client under vLLM's classes.

vLLM's serving classes hand an `EngineClient` the prompt and the sampling parameters, but not the HTTP request. The rest
(tenant, pinned replica, room in the queue, deadline) travels in a context variable, and what the replicas say about the
KV cache travels back the same way.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.gate.admission import AdmissionQueue, Ticket
from app.gate.auth import CALLER, WHO_IS_ADMINISTRATOR, Caller
from app.gate.errors import error_response
from app.gate.kv_cache_field import SAYS_NOTHING, KVCacheField
from app.gate.rates.limits import SPEND, Spend
from app.metrics.left_out import HEADER as LEFT_OUT_HEADER
from app.metrics.left_out import LeftOut
from app.metrics.stages import RequestStages
from app.metrics.usage import RequestKVUsage

GENERATION_PATHS = frozenset({"/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"})
PIN_HEADER = "X-CrossKV-Replica"
LONGEST_TRACEPARENT = 256
"""Characters. Today's have 55; later versions may have more."""
STAGES_HEADER = "X-CrossKV-Stages"
"""With any value but 0: the usage says where the time went."""


STREAM_TIMEOUT_S = 6 * 3600.0
"""Longest time for a stream, however healthy it is."""


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """How long requests may take."""

    request_s: float
    """Those that are not streamed, and the silence of a stream."""
    stream_s: float


@dataclass(slots=True)
class RequestContext:
    """One HTTP request; `arrived` in seconds of `time.monotonic`, which asyncio's loops use too."""

    caller: Caller
    ticket: Ticket
    limits: RequestLimits
    streams: bool = False
    """The body asks for a stream."""
    replica_pin: int | None = None
    traceparent: str = ""
    """Of W3C's Trace Context, as the client says it: no more than a link (`app.observe.traces`)."""
    spend: Spend | None = None
    """What its tokens are counted in; None: its tenant has no limit."""
    max_tokens: int | None = None
    """Tokens of each answer at most, as the body says; None: it says nothing."""
    tells_usage: bool = False
    """Its stream ends with a chunk of its usage."""
    tokens_at_once: int | None = None
    """Tokens that one event of its stream holds; None: all come together, at the end at the latest."""
    sequences: int = 0
    """Answers that its prompts want."""
    logprobs: int = 0
    """Log probabilities that it may have to be told at once (`app.openai.large_answers`)."""
    kv_cache: KVCacheField = SAYS_NOTHING
    """What the body says in its field of that name."""
    extras: dict[str, Any] = field(default_factory=dict)
    """What extensions keep for all its prompts, by their names."""
    arrived: float = field(default_factory=time.monotonic)
    prompts: int = 0
    """Prompts sent to the replicas so far; /v1/completions takes several in one request."""
    starting: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held by the one of its prompts that begins now."""
    kv_usage: RequestKVUsage = field(default_factory=RequestKVUsage)
    stages: RequestStages = field(default_factory=lambda: RequestStages(time.monotonic()))
    """What comes before its prompts part; each has a copy."""
    shows_stages: bool = False
    name_answer: Callable[[str], str] = lambda vllms: vllms
    """What the answer's id is called in this API, of what vLLM's chats and completions call it."""
    first_event_sent: Callable[[], None] = lambda: None
    """To be called when the stream's first event has been sent."""
    left_out: LeftOut = field(default_factory=LeftOut)
    """What of the body is not obeyed, which the answer says."""
    cut: frozenset[int] = frozenset()
    """Which of its answers a limit of tokens has ended, by index; known when all have ended, and not of streams."""
    lax_calls: bool = False
    """The arguments of its forced call are as the model likes, for a grammar with the tool's schema cannot be had."""
    parsed: bool = False
    """The body has become one of vLLM's request objects."""
    live: dict[str, Callable[[], None]] = field(default_factory=dict)
    """Request id on the wire -> what aborts it, for every prompt that has not ended."""

    @property
    def deadline(self) -> float:
        """When the request must have ended."""
        return self.arrived + (self.limits.stream_s if self.streams else self.limits.request_s)

    def next_deadline(self) -> float:
        """Until when to wait for what comes next, from now on. A client that reads slowly is not a silent stream."""
        return min(self.deadline, time.monotonic() + self.limits.request_s) if self.streams else self.deadline

    @property
    def tenant(self) -> str:
        """On whose behalf; empty where there are no keys."""
        return self.caller.tenant

    async def next_prompt(self) -> None:
        """Return when the next of its prompts may begin: one at each turn of the loop, for other streams' sake."""
        async with self.starting:
            await asyncio.sleep(0)

    def reserve(self, prompt_tokens: int, most_tokens: int, answers: int, expected: Callable[[], int]) -> None:
        """Reserve tokens for a prompt with `answers` of at most `most_tokens` each. Raises as `Spend.reserve`.

        `expected`: the likely length of each, which counts where the body does not say.
        """
        if self.spend is not None:
            asked = min(self.max_tokens or 0, most_tokens) * answers
            self.spend.reserve(prompt_tokens, asked, 0 if asked else expected() * answers)

    def close(self) -> None:
        """The HTTP request has ended, in whatever way: free its room and abort what still computes for it."""
        self.ticket.close()
        for abort in self.live.values():
            abort()
        self.live.clear()


_current: ContextVar[RequestContext] = ContextVar("crosskv_request")


def current_request() -> RequestContext:
    """The context of the HTTP request that this task works for."""
    return _current.get()


class _RefusedHeaderError(ValueError):
    """A header that is not obeyed here; the message is meant for the client."""

    def __init__(self, header: str, message: str) -> None:
        super().__init__(message)
        self.header = header


class RequestContextMiddleware:
    """Gives every request its context, and ends what it left behind."""

    def __init__(
        self,
        app: ASGIApp,
        queue: AdmissionQueue,
        limits: RequestLimits,
        count_left_out: Callable[[str, int], None],
    ) -> None:
        """`count_left_out`: by kind."""
        self.app = app
        self.count_left_out = count_left_out
        self.queue = queue
        self.limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One ASGI request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            pin, shows_stages = self._pin(scope), self._debug_header(scope, STAGES_HEADER) not in (None, "0")
        except _RefusedHeaderError as error:
            refusal = error_response(HTTPStatus.BAD_REQUEST, str(error), param=error.header)
            await refusal(scope, receive, send)
            return
        caller: Caller = scope[CALLER]
        context = RequestContext(
            caller=caller,
            ticket=Ticket(self.queue, caller.tenant),
            spend=scope.get(SPEND),
            limits=self.limits,
            replica_pin=pin,
            traceparent=Headers(scope=scope).get("traceparent", "")[:LONGEST_TRACEPARENT],
            shows_stages=shows_stages,
        )

        async def send_with_warnings(message: Message) -> None:
            if message["type"] == "http.response.start" and (said := context.left_out.header()):
                MutableHeaders(scope=message)[LEFT_OUT_HEADER] = said
                for kind, count in context.left_out.counts.items():
                    self.count_left_out(kind, count)
            await send(message)

        token = _current.set(context)
        try:
            await self.app(scope, receive, send_with_warnings)
        finally:
            context.close()
            _current.reset(token)

    def _pin(self, scope: Scope) -> int | None:
        value = self._debug_header(scope, PIN_HEADER)
        if value is None:
            return None
        if not (value.isascii() and value.isdecimal() and len(value) <= 4):
            raise _RefusedHeaderError(PIN_HEADER, f"{PIN_HEADER} must be a replica's number, such as 0 or 1.")
        return int(value)

    def _debug_header(self, scope: Scope, name: str) -> str | None:
        value = Headers(scope=scope).get(name)
        if value is None or scope["path"] not in GENERATION_PATHS:
            return None
        if not scope[CALLER].admin:
            raise _RefusedHeaderError(name, f"{name} is obeyed of administrators. {WHO_IS_ADMINISTRATOR}")
        return value
