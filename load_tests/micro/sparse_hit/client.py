"""Asks one server tolerant questions over HTTP, and has it cool to Redis."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from load_tests.harness.answers import Answer, chat_request
from load_tests.harness.client import Client
from load_tests.harness.server import RunningServer

TOLERANT: Mapping[str, str] = {"fidelity": "tolerant"}


class Cooling:
    """One server. Close it. On one thread."""

    def __init__(self, server: RunningServer, model: str, max_tokens: int) -> None:
        self.server = server
        self._max_tokens = max_tokens
        self._runner = asyncio.Runner()
        self._client = Client(server.url, model)

    def close(self) -> None:
        """End its connections."""
        self._runner.run(self._client.http.aclose())
        self._runner.close()

    def ask(self, request: Mapping[str, Any]) -> Answer:
        """One streamed answer. Raises ServerError where there is none."""
        same = chat_request(self._client.model, [], self._max_tokens)
        return self._runner.run(self._client.chat({**same, **request, "kv_cache": dict(TOLERANT)}))

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
