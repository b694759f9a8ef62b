"""Streamed answers of OpenAI-compatible servers, read and timed for every client.

A stream is `data: {…}` events, and `data: [DONE]` last. Greedy answers only.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from typing import Any

import httpx
from httpx_sse import EventSource

END = "[DONE]"
LONGEST_MESSAGE = 300
_WRITTEN = ("reasoning_content", "reasoning", "content")
"""Where a delta carries what the model wrote; servers differ in where they put a model's reasoning."""


class StreamError(ValueError):
    """The stream is not in OpenAI's wire format."""


class UnendedError(StreamError):
    """It ended without `[DONE]`."""

    def __init__(self) -> None:
        super().__init__("the stream ended without [DONE]")


def events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """Every event before the end, errors among them. Raises StreamError, and httpx.HTTPError as the connection does."""
    for event in EventSource(response).iter_sse():
        if event.data == END:
            return
        yield _parsed(event.data)
    raise UnendedError


async def events_async(response: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """As `events`, on an event loop."""
    async with contextlib.aclosing(EventSource(response).aiter_sse()) as stream:
        async for event in stream:
            if event.data == END:
                return
            yield _parsed(event.data)
    raise UnendedError


def chat_request(model: str, messages: Sequence[Mapping[str, str]], max_tokens: int) -> dict[str, Any]:
    """The body of a request for a streamed chat answer, with usage at its end."""
    return {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


class Answer:
    """What has come of one chat answer, and when: seconds since it was sent, which is when this is made.

    Counts of tokens are the server's; without them `output_tokens` counts the events that brought text.
    """

    def __init__(self) -> None:
        self.sent = time.perf_counter()
        self.seconds = 0.0
        """Until its end; zero before."""
        self.received_bytes = 0
        self.text = ""
        self.ttft_s: float | None = None
        """None for an answer without text."""
        self.last_s = 0.0
        self.pieces = 0
        self.usage: dict[str, Any] = {}

    def take(self, event: Mapping[str, Any]) -> None:
        """One event. Raises StreamError with the server's words when it is an error."""
        if "error" in event:
            raise StreamError(f"error in the stream: {error_message(event)}")
        self.usage = event.get("usage") or self.usage
        for choice in event.get("choices") or ():
            delta = choice.get("delta") or {}
            written = any(delta.get(name) for name in _WRITTEN)
            # The first event only names the role; a token may be an empty text, as half of a character is.
            if written or ("role" not in delta and "content" in delta):
                self.last_s = time.perf_counter() - self.sent
                self.ttft_s = self.ttft_s or self.last_s
                self.pieces += 1
                self.text += delta.get("content") or ""

    @property
    def first_text_s(self) -> float:
        """`ttft_s` of an answer that has text. Raises StreamError for one without."""
        if self.ttft_s is None:
            raise StreamError("an answer has no text")
        return self.ttft_s

    @property
    def output_tokens(self) -> int:
        """Of the answer."""
        return int(self.usage.get("completion_tokens") or self.pieces)

    @property
    def tpot_s(self) -> float | None:
        """Mean time of each token after the first; None where there is none."""
        if self.ttft_s is None or self.output_tokens < 2:
            return None
        return (self.last_s - self.ttft_s) / (self.output_tokens - 1)

    @property
    def prompt_tokens(self) -> int | None:
        """Of the prompt; None where the server does not say."""
        return self.usage.get("prompt_tokens")

    @property
    def kv_cache(self) -> dict[str, Any]:
        """crosskv's account of where the prompt's KV came from; empty of another server."""
        return dict(self.usage.get("kv_cache") or {})

    @property
    def cached_tokens(self) -> int | None:
        """Those of the prompt whose KV was reused; None where the server does not say."""
        return (self.usage.get("prompt_tokens_details") or {}).get("cached_tokens")


def error_message(answer: str | Mapping[str, Any]) -> str:
    """The server's own words, from OpenAI's shape of an error or whatever else it sent."""
    if isinstance(answer, str):
        with contextlib.suppress(ValueError):
            answer = json.loads(answer)
    error = answer.get("error", answer) if isinstance(answer, Mapping) else answer
    message = error.get("message") if isinstance(error, Mapping) else error
    return " ".join(str(message or answer).split())[:LONGEST_MESSAGE]


def _parsed(data: str) -> dict[str, Any]:
    try:
        event = json.loads(data)
    except ValueError:
        event = None
    if not isinstance(event, dict):
        raise StreamError("the stream held an event that is not a JSON object")
    return event
