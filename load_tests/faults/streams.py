"""Streamed greedy completions, several at once, and what came of each."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from load_tests.harness.answers import UnendedError
from load_tests.harness.client import COMPLETIONS, Client, StatusError, pinned

REQUEST_S = 120.0


@dataclass
class Stream:
    """One request: its tokens so far, and how it ended. `error` is the error event's or the response's message."""

    prompt: list[int]
    tokens: list[int] = field(default_factory=list)
    kv_cache: dict[str, Any] = field(default_factory=dict)
    error: str = ""
    ended: bool = False
    """With `[DONE]`, as a stream ends that the client may trust."""
    first_token_s: float = 0.0
    seconds: float = 0.0
    longest_silence_s: float = 0.0
    """Between two tokens."""
    last_token_s: float = 0.0
    begun: asyncio.Event = field(default_factory=asyncio.Event)
    """Set by the first token, or by the end."""


async def run_stream(
    client: Client, stream: Stream, max_tokens: int, extra: Mapping[str, Any] | None = None, pin: int | None = None
) -> None:
    """Send the stream's prompt, with what is `extra` in the body, and read it to its end; `pin`: at this replica.

    Never raises for what the server does.
    """
    began = time.monotonic()
    usage = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    body = client.completion(stream.prompt, max_tokens, **{**usage, **(extra or {})})
    try:
        async with contextlib.aclosing(client.events(COMPLETIONS, body, pinned(pin))) as events:
            async for event in events:
                _read_event(stream, event, began)
        stream.ended = True
    except UnendedError:
        pass  # which `ended` says
    except StatusError as error:
        stream.error = str(error)
    except (httpx.HTTPError, ValueError, KeyError) as error:
        stream.error = f"not OpenAI's wire format: {error!r}"
    finally:
        stream.seconds = time.monotonic() - began
        stream.begun.set()


def _read_event(stream: Stream, event: dict[str, Any], began: float) -> None:
    if "error" in event:
        stream.error = event["error"]["message"]
        return
    if event.get("usage"):
        stream.kv_cache = event["usage"]["kv_cache"]
    for choice in event["choices"]:
        if choice.get("token_ids"):
            now_s = time.monotonic() - began
            stream.first_token_s = stream.first_token_s or now_s
            stream.longest_silence_s = max(stream.longest_silence_s, now_s - (stream.last_token_s or now_s))
            stream.last_token_s = now_s
            stream.tokens += choice["token_ids"]
            stream.begun.set()


async def run_streams(
    url: str, model: str, prompts: Sequence[list[int]], max_tokens: int, extra: Mapping[str, Any] | None = None
) -> list[Stream]:
    """All prompts at once."""
    streams = [Stream(prompt) for prompt in prompts]
    async with Client(url, model, timeout_s=REQUEST_S) as client:
        await asyncio.gather(*(run_stream(client, stream, max_tokens, extra) for stream in streams))
    return streams
