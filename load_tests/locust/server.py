"""What a load test has to know of an OpenAI-compatible server before the load: its model, its tokenizer."""

from __future__ import annotations

import random
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

import httpx

from load_tests.harness.answers import error_message
from load_tests.workloads.words import WORDS

ASSUMED_CONTEXT_TOKENS = 4096
"""Where GET /v1/models does not give `max_model_len` (an extension of vLLM's)."""
TIMEOUT_S = 60.0
_SAMPLE_WORDS = 100


class ServerUnusableError(Exception):
    """The server cannot take this load; the message is a sentence that says what to do."""


class ServerUnreachableError(ServerUnusableError):
    """Nothing listens at the address."""


@dataclass(frozen=True)
class Served:
    """A model of a server at `url` (without /v1), and the most tokens of prompt and answer together."""

    url: str
    model: str
    context_tokens: int


def base_url(host: str) -> str:
    """The server's address without the `/v1` that OpenAI clients write behind it."""
    return host.rstrip("/").removesuffix("/v1").rstrip("/")


def authorization(api_key: str | None) -> dict[str, str]:
    """Headers of every request."""
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


def find_model(host: str, wanted: str | None, api_key: str | None) -> Served:
    """The model `wanted`, or the first of GET /v1/models. Raises ServerUnusableError."""
    url = base_url(host)
    answer = _ask("GET", f"{url}/v1/models", api_key)
    try:
        models = {str(model["id"]): model for model in answer["data"]}
        chosen = wanted or next(iter(models))
    except (KeyError, TypeError, StopIteration):
        raise ServerUnusableError(f"{url}/v1/models lists no model; is this an OpenAI-compatible server?") from None
    if chosen not in models:
        raise ServerUnusableError(f"{url} does not have the model {chosen!r}; it has {', '.join(map(repr, models))}.")
    return Served(url, chosen, int(models[chosen].get("max_model_len") or ASSUMED_CONTEXT_TOKENS))


def tokens_per_character(served: Served, api_key: str | None) -> float:
    """Of texts made of common words, a little too high: the chat template counts as text. Raises ServerUnusableError.

    Asks the server for one token, since only it knows its tokenizer.
    """
    sample = " ".join(random.Random(0).choices(WORDS, k=_SAMPLE_WORDS))
    body = {"model": served.model, "messages": [{"role": "user", "content": sample}], "max_tokens": 1}
    answer = _ask("POST", f"{served.url}/v1/chat/completions", api_key, body)
    try:
        return float(answer["usage"]["prompt_tokens"] / len(sample))
    except (KeyError, TypeError):
        raise ServerUnusableError(f"{served.url} does not tell `usage.prompt_tokens` in its answers.") from None


def _ask(method: str, url: str, api_key: str | None, body: object = None) -> Any:
    try:
        response = httpx.request(method, url, json=body, headers=authorization(api_key), timeout=TIMEOUT_S)
    except httpx.ConnectError:
        raise ServerUnreachableError(f"No server answers at {url}; start one, or name another with --host.") from None
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ServerUnusableError(f"{url} cannot be used: {error or type(error).__name__}.") from None
    if response.status_code == HTTPStatus.UNAUTHORIZED:
        raise ServerUnusableError(f"{url} wants a key that it knows; give it with --api-key or in OPENAI_API_KEY.")
    if response.is_error:
        raise ServerUnusableError(f"{url} answered HTTP {response.status_code}: {error_message(response.text)}")
    try:
        return response.json()
    except ValueError:
        raise ServerUnusableError(f"{url} did not answer in JSON; is this an OpenAI-compatible server?") from None
