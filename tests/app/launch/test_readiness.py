"""What the launcher makes of /health: ready without Redis, not without a replica; and what it tells the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.launch.plan import Overrides, make_plan
from app.launch.readiness import CHATS_IN_A_ROW, Readiness
from tests.app.launch.stub_config import write_config

WELL: dict[str, Any] = {
    "ingress": {"state": "ok", "ongoing": 0, "waiting": 0},
    "kv_manager": {"state": "ok"},
    "replicas": {"state": "ok", "running": [0, 1]},
    "cpu_tier": {"state": "ok", "running": 1},
    "redis": {"state": "ok", "indexing": False, "segments": 0},
}


class Health:
    """What /health answers."""

    def __init__(self) -> None:
        self.code = 200
        self.body: Any = {"status": "ok", "parts": WELL}
        self.answers: dict[str, int] = {}
        """By path, where it is not 200."""
        self.asked: list[str] = []

    def answer(self, request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            self.asked.append(request.url.path)
            status = self.answers.get(request.url.path, 200)
            return httpx.Response(status, json={} if status == 200 else {"error": {"message": "no template"}})
        return httpx.Response(self.code, json=self.body)

    def say(self, **parts: dict[str, Any]) -> None:
        self.body = {"status": "degraded", "parts": WELL | parts}


@pytest.fixture
def health() -> Health:
    return Health()


@pytest.fixture
def readiness(health: Health, tmp_path: Path, model_folder: Path) -> Iterator[Readiness]:
    readiness = Readiness(make_plan(write_config(tmp_path, model_folder), Overrides()))
    readiness._client = httpx.Client(base_url="http://server", transport=httpx.MockTransport(health.answer))
    yield readiness
    readiness.close()


def test_a_server_that_is_well_is_ready_and_nothing_is_said(readiness: Readiness) -> None:
    assert readiness.is_healthy()
    assert readiness.ailments() == []


def test_readiness_does_not_wait_for_redis(readiness: Readiness, health: Health) -> None:
    health.say(redis={"state": "running with two tiers: no Redis", "indexing": False, "segments": 0})
    assert readiness.is_healthy()
    assert readiness.ailments() == ["redis: running with two tiers: no Redis"]


def test_a_redis_that_is_still_being_indexed_is_no_ailment(readiness: Readiness, health: Health) -> None:
    assert not readiness.indexing()
    health.say(redis={"state": "reading what it holds", "indexing": True, "segments": 7})
    assert readiness.is_healthy()
    assert readiness.ailments() == []
    assert readiness.indexing(), "it is waited for"


def test_readiness_waits_for_every_replica(readiness: Readiness, health: Health) -> None:
    health.say(replicas={"state": "1 of 2 missing", "running": [0]})
    assert not readiness.is_healthy()


def test_a_manager_that_does_not_answer_is_not_waited_for(readiness: Readiness, health: Health) -> None:
    health.body = {"status": "degraded", "parts": {"kv_manager": {"state": "does not answer"}}}
    assert readiness.is_healthy()
    assert readiness.ailments() == ["kv_manager: does not answer"]


@pytest.mark.parametrize("body", [[], "ok", {"parts": []}])
def test_an_answer_of_another_server_is_not_readiness(readiness: Readiness, health: Health, body: Any) -> None:
    health.body = body
    assert not readiness.is_healthy()
    assert not readiness.ailments()


def test_a_server_that_serves_no_requests_is_not_ready(readiness: Readiness, health: Health) -> None:
    health.code = 503
    assert not readiness.is_healthy()
    assert readiness.ailments() is None


def test_running_and_waiting_requests_are_counted_together(readiness: Readiness, health: Health) -> None:
    health.say(ingress={"state": "ok", "ongoing": 2, "waiting": 3})
    assert readiness.requests() == 5
    health.body = {"parts": {}}
    assert readiness.requests() is None


def becomes_ready(readiness: Readiness) -> bool:
    """What the last look of a start sees."""
    return [readiness.gives_a_token() for _ in range(CHATS_IN_A_ROW)][-1]


CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


def test_ready_means_that_a_chat_is_answered(readiness: Readiness, health: Health) -> None:
    assert becomes_ready(readiness)
    assert set(health.asked) == {CHAT}
    assert readiness.ailments() == []


@pytest.mark.parametrize("status", [500, 503])
def test_a_server_that_completes_prompts_and_fails_chats_is_not_ready(
    readiness: Readiness, health: Health, status: int
) -> None:
    health.answers = {CHAT: status}
    assert not becomes_ready(readiness)


def test_one_answer_before_a_failure_is_not_readiness(readiness: Readiness, health: Health) -> None:
    for _ in range(3):
        assert not any(readiness.gives_a_token() for _ in range(CHATS_IN_A_ROW - 1))
        health.answers = {CHAT: 503}
        assert not readiness.gives_a_token()
        health.answers = {}
    assert becomes_ready(readiness)


def test_each_question_has_a_connection_of_its_own(tmp_path: Path, model_folder: Path) -> None:
    readiness = Readiness(make_plan(write_config(tmp_path, model_folder), Overrides()))
    pool: Any = readiness._client._transport
    assert pool._pool._max_keepalive_connections == 0
    readiness.close()


def test_a_model_whose_chats_are_refused_is_ready_for_prompts_and_that_is_said(
    readiness: Readiness, health: Health
) -> None:
    health.answers = {CHAT: 400}
    assert becomes_ready(readiness)
    assert readiness.ailments() == ["chats are refused: no template"]
    health.answers = {CHAT: 400, COMPLETIONS: 503}
    assert not readiness.gives_a_token()
    health.answers = {}
    assert becomes_ready(readiness)
    assert readiness.ailments() == []
