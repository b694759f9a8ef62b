"""Asks one server tolerant questions over HTTP, and times first tokens."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import httpx

from load_tests.harness.answers import ChatAnswer, chat_request, error_message, events
from load_tests.harness.server import RunningServer, ServerError

PATIENCE_S = 300.0
TOLERANT: Mapping[str, str] = {"fidelity": "tolerant"}


@dataclass(frozen=True)
class Asked:
    """One answer: its text, seconds to its first token, and the server's account of its prompt's KV."""

    text: str
    ttft_s: float
    prompt_tokens: int
    kv_cache: dict[str, Any]

    def from_tier(self, tier: str) -> int:
        """Tokens of the prompt whose KV came from there; `recomputed`: that were computed."""
        return int(self.kv_cache.get(tier, 0))


class Client:
    """Of one server. Close it."""

    def __init__(self, server: RunningServer, model: str, max_tokens: int) -> None:
        self.server = server
        self._model, self._max_tokens = model, max_tokens
        self._http = httpx.Client(base_url=server.url, timeout=PATIENCE_S)

    def close(self) -> None:
        """End its connections."""
        self._http.close()

    def ask(self, request: Mapping[str, Any]) -> Asked:
        """One streamed answer. Raises ServerError where there is none."""
        body = {**chat_request(self._model, [], self._max_tokens), **request, "kv_cache": dict(TOLERANT)}
        answer = ChatAnswer()
        with self._http.stream("POST", "/v1/chat/completions", json=body) as response:
            if response.status_code != 200:
                raise ServerError(error_message(response.read().decode(errors="replace")))
            for event in events(response):
                answer.take(event)
        if answer.ttft_s is None or not answer.prompt_tokens:
            raise ServerError("an answer has no text, or no usage")
        return Asked(answer.text, answer.ttft_s, answer.prompt_tokens, answer.usage.get("kv_cache") or {})

    def cool(self, deadline_s: float = 60.0) -> int:
        """Wait until Redis has all that the CPU tier has; bytes in Redis. Raises ServerError."""
        self.server.wait_until_idle(deadline_s)
        segments = self.server.segments
        self.server.wait_until(
            lambda: segments("cpu") > 0 and segments("redis") == segments("cpu"), "Redis has all segments", deadline_s
        )
        self.server.wait_until_idle(deadline_s)
        return int(self.server.metric("crosskv_tier_bytes", tier="redis"))

    def forget(self, *tiers: str) -> None:
        """These tiers hold nothing then."""
        self.server.wait_until_idle(60.0)
        self.server.clear(*tiers)
        self.server.wait_until_idle(60.0)
