"""Thirty turns of Codex and of Claude Code: none is refused, and each computes little more than what is new in it."""

from __future__ import annotations

from typing import Any

import pytest
from agents import TURNS, ClaudeCode, Codex, Turn, replay
from load_tests.harness.running_server import RunningServer

pytestmark = pytest.mark.server

BLOCK_TOKENS = 32
"""vLLM's on a CPU."""
AGENTS: list[Any] = [Codex, ClaudeCode]
CLAUDES = "claude-sonnet-4-5-20250929"
"""One of the servers' `http.model_aliases`."""


def played(server: RunningServer, agent: Any) -> list[Turn]:
    """All turns, from a server that has nothing of them; none is refused."""

    def turns() -> list[Turn]:
        server.clear("device", "cpu", "redis")
        return list(replay(server.url, agent(CLAUDES)))

    found = server.in_time(turns)
    assert [(turn.status, turn.error) for turn in found] == [(200, "")] * TURNS
    assert found[-1].prompt_tokens > 2 * found[0].prompt_tokens, "the conversation grows"
    return found


def computed_again(turns: list[Turn]) -> dict[int, int]:
    """By turn: tokens of the prompt before that were not reused, beyond its last block and one more."""
    found = {}
    for number, turn in enumerate(turns[1:], start=1):
        again = (turns[number - 1].prompt_tokens // BLOCK_TOKENS - 1) * BLOCK_TOKENS - turn.cached_tokens
        if again > 0:
            found[number] = again
    return found


@pytest.mark.parametrize("agent", AGENTS)
def test_each_turn_of_an_agent_computes_its_own_tokens_and_at_most_one_block(server: RunningServer, agent: Any) -> None:
    assert computed_again(played(server, agent)) == {}
