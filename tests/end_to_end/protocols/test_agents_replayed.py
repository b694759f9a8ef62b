"""Thirty turns of Codex and of Claude Code: none is refused, and each computes little more than what is new in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from agents import QUESTION_EACH, TURNS, ClaudeCode, Codex, Turn, is_question, replay

from load_tests.harness.models import model_folder
from load_tests.harness.server import RunningServer, started

pytestmark = pytest.mark.server

BLOCK_TOKENS = 32
"""vLLM's on a CPU."""
AGENTS: list[Any] = [Codex, ClaudeCode]
CLAUDES = "claude-sonnet-4-5-20250929"
"""One of the servers' `http.model_aliases`."""
PRINTS_ALL = Path(__file__).with_name("agents.jinja")


@pytest.fixture(scope="module")
def printing(whole_server: Any, tmp_path_factory: pytest.TempPathFactory) -> RunningServer:
    """A server whose chat template prints tools, calls and thoughts, which the demo model's does not."""
    folder = tmp_path_factory.mktemp("printing")
    settings = {
        "model": str(model_folder("10m", folder)),
        "chat_template": str(PRINTS_ALL),
        "replicas": 1,
        "engine": {"enforce_eager": True, "threads": 1, "tool_call_parser": "hermes"},
        "http": {"model_aliases": ["claude-*"]},
        "kv": {"redis_url": None},
    }
    running: RunningServer = whole_server.get("printing", lambda stack: stack.enter_context(started(folder, settings)))
    return running


def played(server: RunningServer, agent: Any) -> list[Turn]:
    """All turns, from a server that has nothing of them; none is refused."""

    def turns() -> list[Turn]:
        server.clear("device", "cpu", "redis")
        return list(replay(server.url, agent(CLAUDES)))

    found = server.in_time(turns)
    assert [(turn.status, turn.error) for turn in found] == [(200, "")] * TURNS
    assert found[-1].prompt_tokens > 2 * found[0].prompt_tokens, "the conversation grows"
    return found


def computed_again(turns: list[Turn], forgets_thoughts: bool = False) -> dict[int, int]:
    """By turn: tokens of the prompt before that were not reused, beyond its last block and one more.

    `forgets_thoughts`: with a new question the thoughts about the last one leave the prompt, and what is behind them
    is another text.
    """
    found = {}
    for number, turn in enumerate(turns[1:], start=1):
        before = turns[number - (QUESTION_EACH if forgets_thoughts and is_question(number) else 1)]
        again = (before.prompt_tokens // BLOCK_TOKENS - 1) * BLOCK_TOKENS - turn.cached_tokens
        if again > 0:
            found[number] = again
    return found


@pytest.mark.parametrize("agent", AGENTS)
def test_each_turn_of_an_agent_computes_its_own_tokens_and_at_most_one_block(server: RunningServer, agent: Any) -> None:
    assert computed_again(played(server, agent)) == {}


@pytest.mark.long(
    "tests/end_to_end/protocols/test_agents_replayed.py"
    "::test_each_turn_of_an_agent_computes_its_own_tokens_and_at_most_one_block"
)
@pytest.mark.parametrize("agent", AGENTS)
def test_it_does_so_where_tools_calls_and_thoughts_are_in_the_prompt(printing: RunningServer, agent: Any) -> None:
    assert computed_again(played(printing, agent), forgets_thoughts=True) == {}
