"""Reuse from any tier changes no token: the contract that everything else stands on."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path

import pytest
from plain_references import plain_references, plan

from load_tests.faults.inside import Inside
from load_tests.harness.conversations import Turn, run
from load_tests.harness.running_server import RunningServer
from load_tests.micro.exactness import Verdict, compare
from tests.sizes import CONVERSATIONS

pytestmark = [pytest.mark.server, pytest.mark.timeout(900)]

MOST_HELD = 60
"""Segments that the tiers of `CHURN` hold together, about. When more have left, all of them have been exchanged."""
CHURN = {
    "dtype": "float32",
    "http": {"debug_headers": True},
    "engine": {"enforce_eager": True, "threads": 1, "device_blocks": 160},
    # About 20 segments in the CPU tier and 40 in Redis; the conversations make several times as many.
    # Least recently used goes first, for the default policy would rather refuse what is new than let all of it churn.
    "kv": {
        "cpu_tier_bytes": "32MiB",
        "redis_bytes": "64MiB",
        "segment_tokens": 256,
        "eviction_policy": "lru",
        "load_or_recompute": "load",
        "save_deadline_s": 8.0,
        "lease_s": 5.0,  # of a lost plan, which is waited for at the end
    },
}


@pytest.fixture
def references(pytestconfig: pytest.Config) -> Path:
    """Where plain vLLM's answers are kept."""
    assert pytestconfig.cache is not None
    return pytestconfig.cache.mkdir("plain-vllm")


def verdict_of(server: RunningServer, references: Path, *cleared: tuple[str, ...]) -> Verdict:
    """For each element of `cleared` its share of the conversations; only these tiers are cleared in it."""
    turns: list[Turn] = []
    for seed, tiers in enumerate(cleared, 20):
        turns += asyncio.run(run(server.url, "demo", plan(CONVERSATIONS // len(cleared), seed, tiers)))
    verdict = compare(turns, plain_references(turns, server.model_folder, references), CONVERSATIONS)
    print(verdict)
    assert sum(verdict.prompt_tokens_by_source.values()) == sum(len(turn.prompt) for turn in turns)
    return verdict


def test_disturbed_conversations_answer_as_plain_vllm_does(server: RunningServer, references: Path) -> None:
    verdict = verdict_of(server, references, ("device", "cpu"), ("device", "cpu", "redis"))

    assert verdict.different_answers == 0
    reused = verdict.prompt_tokens_by_source
    enough = all(reused[tier] > 200 for tier in ("device", "cpu", "redis"))
    assert enough, f"too little was reused for this to mean anything: {reused}"
    server.wait_until_idle()


@pytest.mark.long("tests/deployments/together/test_churn.py::test_tiers_that_churn_and_fail_change_no_answer")
@pytest.mark.parametrize("private_server", [CHURN], indirect=True)
def test_tiers_that_churn_and_fail_answer_as_plain_vllm_does(private_server: RunningServer, references: Path) -> None:
    with contextlib.closing(Inside(private_server)) as inside:
        inside.do("disturb_redis", 0.05, 0.1)
        inside.do("lose_some_replies", 0.05)
    # Redis is left to its faults: cleared too, it would be empty most of the time.
    verdict = verdict_of(private_server, references, ("device", "cpu"), ("device", "cpu"))

    assert verdict.different_answers == 0
    reused = verdict.prompt_tokens_by_source
    # How much of it Redis still has when it is wanted is chance: a slow machine saw 128 tokens.
    assert min(reused["device"], reused["cpu"]) > 200, f"too little was reused: {reused}"
    assert reused["redis"] > 64, f"too little came from Redis: {reused}"
    evicted = private_server.metric("crosskv_manager_evicted_segments_total")
    assert evicted > MOST_HELD, "the tiers are not small enough"
    private_server.wait_until_idle(deadline_s=60.0)  # the leases of lost plans end by themselves
