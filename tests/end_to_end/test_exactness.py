"""Reuse from any tier changes no token: the contract that everything else stands on."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping
from pathlib import Path

import pytest
from plain_references import TURNS, plain_references, plan

from load_tests.faults.inside import Inside
from load_tests.harness.conversations import Turn, run
from load_tests.harness.server import RunningServer
from load_tests.micro.exactness import Verdict, compare
from tests.sizes import CONVERSATIONS

pytestmark = pytest.mark.server

ROUNDS = 4
MOST_HELD = 60
"""Segments that the tiers of `CHURN` hold together, about. When more have left, all of them have been exchanged."""
CHURN = {
    "dtype": "float32",
    "engine": {"enforce_eager": True, "threads": 1, "device_blocks": 160},
    # About 20 segments in the CPU tier and 40 in Redis; the conversations make several times as many.
    # Least recently used goes first, for the default policy would rather refuse what is new than let all of it churn.
    "kv": {
        "cpu_tier_bytes": "32MiB",
        "redis_bytes": "64MiB",
        "segment_tokens": 256,
        "eviction_policy": "lru",
        "load_or_recompute": "load",
        "lease_s": 8.0,  # of a lost plan, which is waited for at the end
    },
}


@pytest.fixture
def references(pytestconfig: pytest.Config) -> Path:
    """Where plain vLLM's answers are kept."""
    assert pytestconfig.cache is not None
    return pytestconfig.cache.mkdir("plain-vllm")


def verdict_of(server: RunningServer, references: Path, least: Mapping[str, int], *cleared: tuple[str, ...]) -> Verdict:
    """For each element of `cleared` its share of the conversations; only these tiers are cleared in it.

    They are held again until each tier has given more prompt tokens than `least` says, `ROUNDS` times at most:
    on a slow machine what is saved comes late, and is cleared before it is asked for.
    """
    turns: list[Turn] = []
    for _ in range(ROUNDS):
        for seed, tiers in enumerate(cleared, 20):
            turns += asyncio.run(run(server.url, "demo", plan(CONVERSATIONS // len(cleared), seed, tiers)))
        if all(sum(turn.kv_cache.get(tier, 0) for turn in turns) > tokens for tier, tokens in least.items()):
            break
    verdict = compare(turns, plain_references(turns, server.model_folder, references), len(turns) // TURNS)
    print(verdict)
    reused = verdict.prompt_tokens_by_source
    assert sum(reused.values()) == sum(len(turn.prompt) for turn in turns)
    enough = all(reused[tier] > tokens for tier, tokens in least.items())
    assert enough, f"too little was reused for this to mean anything: {reused}"
    return verdict


def test_disturbed_conversations_answer_as_plain_vllm_does(server: RunningServer, references: Path) -> None:
    least = {"device": 200, "cpu": 200, "redis": 200}
    verdict = verdict_of(server, references, least, ("device", "cpu"), ("device", "cpu", "redis"))

    assert verdict.different_answers == 0
    server.wait_until_idle()


@pytest.mark.long("tests/deployments/together/test_churn.py::test_tiers_that_churn_and_fail_change_no_answer")
@pytest.mark.parametrize("private_server", [CHURN], indirect=True)
def test_tiers_that_churn_and_fail_answer_as_plain_vllm_does(private_server: RunningServer, references: Path) -> None:
    with contextlib.closing(Inside(private_server)) as inside:
        inside.do("disturb_redis", 0.05, 0.1)
        inside.do("lose_some_replies", 0.05)
    # Redis is left to its faults: cleared too, it would be empty most of the time.
    # How much of it Redis still has when it is wanted is chance: a slow machine saw 128 tokens.
    least = {"device": 200, "cpu": 200, "redis": 64}
    verdict = verdict_of(private_server, references, least, ("device", "cpu"), ("device", "cpu"))

    assert verdict.different_answers == 0
    evicted = private_server.metric("crosskv_manager_evicted_segments_total")
    assert evicted > MOST_HELD, "the tiers are not small enough"
    private_server.wait_until_idle()
