"""One streamed chat completion, timed as its reader sees it."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Any

import httpx

from load_tests.locust.server import error_message

_GENERATED = ("content", "reasoning_content", "reasoning")
"""Where a delta carries what the model wrote; servers differ in where they put a model's reasoning."""


class AnswerError(Exception):
    """The request was not answered to its end. `retry_after_s` is what the server asked for, if it did."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TurnedAwayError(AnswerError):
    """HTTP 429 with Retry-After: the server is full and said when to come back. No failure, but no answer."""


@dataclass(frozen=True)
class Answer:
    """What came, and when: seconds since the request was sent.

    `ttft_s` is None for an empty answer; `tpot_s` is the mean time of each token after the first, None when there is
    none. Token counts are the server's; without them `output_tokens` counts the events that brought text, and the
    others are None.
    """

    text: str
    ttft_s: float | None
    tpot_s: float | None
    seconds: float
    received_bytes: int
    output_tokens: int
    prompt_tokens: int | None
    cached_tokens: int | None


def ask(client: httpx.Client, model: str, messages: Sequence[Mapping[str, str]], max_tokens: int) -> Answer:
    """The greedy answer to `messages`, from `client`'s server. Raises AnswerError."""
    body = {
        "model": model,
        "messages": messages,
        "max_tokens": max_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    sent = time.perf_counter()
    try:
        with client.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.is_error:
                response.read()
                raise _refusal(response)
            return _read(response, sent)
    except httpx.ConnectError:
        raise AnswerError("cannot connect to the server") from None
    except httpx.TimeoutException as error:
        raise AnswerError(f"no answer in time ({type(error).__name__})") from None
    except httpx.HTTPError as error:
        raise AnswerError(f"the connection broke: {error or type(error).__name__}") from None


def _read(response: httpx.Response, sent: float) -> Answer:
    text: list[str] = []
    times: list[float] = []
    usage: dict[str, Any] = {}
    for event in _events(response):
        usage = event.get("usage") or usage
        choices: list[dict[str, Any]] = event.get("choices") or [{}]
        delta: dict[str, Any] = choices[0].get("delta") or {}
        if any(delta.get(name) for name in _GENERATED):
            times.append(time.perf_counter() - sent)
            text.append(delta.get("content") or "")
    tokens = usage.get("completion_tokens", len(times))
    return Answer(
        "".join(text),
        times[0] if times else None,
        (times[-1] - times[0]) / (tokens - 1) if times and tokens > 1 else None,
        time.perf_counter() - sent,
        response.num_bytes_downloaded,
        tokens,
        usage.get("prompt_tokens"),
        (usage.get("prompt_tokens_details") or {}).get("cached_tokens") if usage else None,
    )


def _events(response: httpx.Response) -> Iterator[dict[str, Any]]:
    """The stream's events up to [DONE]. Raises AnswerError for an error among them, and for a stream without an end."""
    for line in response.iter_lines():
        if not line.startswith("data:"):
            continue
        data = line.removeprefix("data:").strip()
        if data == "[DONE]":
            return
        try:
            event = json.loads(data)
        except ValueError:
            raise AnswerError("the stream held an event that is not JSON") from None
        if not isinstance(event, dict) or "error" in event:
            raise AnswerError(f"error in the stream: {error_message(data)}")
        yield event
    raise AnswerError("the stream ended without [DONE]")


def _refusal(response: httpx.Response) -> AnswerError:
    message = f"HTTP {response.status_code}: {error_message(response.text)}"
    wait = retry_after_s(response.headers.get("Retry-After"))
    if response.status_code == HTTPStatus.TOO_MANY_REQUESTS and wait is not None:
        return TurnedAwayError(message, wait)
    return AnswerError(message, wait)


def retry_after_s(header: str | None) -> float | None:
    """Seconds that a Retry-After header asks for, as a number or until a date (RFC 9110, 10.2.3); None without one."""
    if not header:
        return None
    try:
        return max(0.0, float(header))
    except ValueError:
        pass
    try:
        return max(0.0, (parsedate_to_datetime(header) - datetime.now(UTC)).total_seconds())
    except (ValueError, TypeError):
        return None
