"""Reuse from any tier changes no token: the contract that everything else stands on."""

from __future__ import annotations

import asyncio

import pytest

from load_tests.conversations import Plan, run
from load_tests.exactness import compare, plain_answers
from load_tests.running_server import RunningServer

pytestmark = pytest.mark.server


@pytest.mark.timeout(900)
def test_a_hundred_disturbed_conversations_answer_as_plain_vllm_does(server: RunningServer) -> None:
    plan = Plan(conversations=100, turns=3, longest_prompt_tokens=3000, seed=20)

    turns = asyncio.run(run(server.url, "demo", plan))

    verdict = compare(turns, plain_answers(turns, str(server.model_folder), "float32"), plan.conversations)
    print(verdict)
    assert verdict.different_answers == 0
    reused = verdict.prompt_tokens_by_source
    assert min(reused["device"], reused["cpu"]) > 5_000, f"too little was reused for this to mean anything: {reused}"
    assert sum(reused.values()) == sum(len(turn.prompt) for turn in turns)
    server.wait_until_idle()
