"""A server that was started while its Redis refused it, as it did until Redis took its password."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import httpx

from load_tests.harness.patience import patience
from load_tests.harness.server import RunningServer


@dataclass(frozen=True)
class WithoutRedis:
    """What /health said of Redis, the answers to one prompt that came twice, and what the launcher printed."""

    redis_state: str
    answers: list[dict[str, Any]]
    log: str


def look(server: RunningServer) -> WithoutRedis:
    """Raises ServerError where neither /health nor the launcher names the reason."""

    def redis_state() -> str:
        return str(server.part("redis")["state"])

    server.wait_until(lambda: "password" in redis_state(), "the reason is named")
    body = {"model": "demo", "prompt": "Anna lives in Oslo. " * 60, "max_tokens": 4}
    headers = {"X-CrossKV-Replica": "0"}
    answers: list[Any] = []

    def answered() -> bool:
        """Whether replica 0 answers: right after the start its router may not have heard of it."""
        answer = httpx.post(f"{server.url}/v1/completions", json=body, headers=headers, timeout=patience(60))
        answers.extend([answer.json()] if answer.is_success else [])
        return len(answers) == 2

    server.wait_until(answered, "two answers")
    server.wait_until(lambda: "redis:" in server.log.read_text(), "the launcher has told it too")
    return WithoutRedis(redis_state(), answers, server.log.read_text())
