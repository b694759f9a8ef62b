"""One streamed chat completion, timed as its reader sees it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus

import httpx

from load_tests.harness.answers import Answer, StreamError, chat_request, error_message, events


class AnswerError(Exception):
    """The request was not answered to its end. `retry_after_s` is what the server asked for, if it did."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class TurnedAwayError(AnswerError):
    """HTTP 429 with Retry-After: the server is full and said when to come back. No failure, but no answer."""


def ask(client: httpx.Client, model: str, messages: Sequence[Mapping[str, str]], max_tokens: int) -> Answer:
    """The greedy answer to `messages`, from `client`'s server. Raises AnswerError."""
    answer = Answer()
    try:
        with client.stream("POST", "/v1/chat/completions", json=chat_request(model, messages, max_tokens)) as response:
            if response.is_error:
                response.read()
                raise _refusal(response)
            for event in events(response):
                answer.take(event)
            answer.seconds = time.perf_counter() - answer.sent
            answer.received_bytes = response.num_bytes_downloaded
    except httpx.ConnectError:
        raise AnswerError("cannot connect to the server") from None
    except httpx.TimeoutException as error:
        raise AnswerError(f"no answer in time ({type(error).__name__})") from None
    except httpx.HTTPError as error:
        raise AnswerError(f"the connection broke: {error or type(error).__name__}") from None
    except StreamError as error:
        raise AnswerError(str(error)) from None
    return answer


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
