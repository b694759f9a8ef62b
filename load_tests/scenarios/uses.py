"""By scenario: a workload that fits it, whose prompts' fidelity, and whether it comes back from Redis alone."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from load_tests.workloads.chunks import rearranged_chunks
from load_tests.workloads.documents import long_document_qa
from load_tests.workloads.rounds import multi_round_qa
from load_tests.workloads.words import Words
from load_tests.workloads.workload import Workload

LONGEST = 2_048
"""Tokens of the longest prompt with its answer."""
DEVICE_TOKENS = 2 * LONGEST
DEFAULTS, SCENARIO = "defaults", "scenario"
SAME_PROMPTS = "defaults, same prompts"


@dataclass(frozen=True)
class Use:
    """`fidelity`: what prompts of the scenario's arm ask for; None: exact ones.

    `cools`: after the workload only Redis keeps its KV, and each session's first request comes once more; that is what
    is timed. `judges_all`: all requests are timed, not only those that come back.
    """

    scenario: str
    workload: Callable[[random.Random, Words], Workload]
    fidelity: str | None = None
    cools: bool = False
    judges_all: bool = False

    @property
    def arms(self) -> tuple[str, ...]:
        """Names of the arms; the first one is what ratios are to."""
        return (DEFAULTS, SAME_PROMPTS, SCENARIO) if self.fidelity else (DEFAULTS, SCENARIO)

    def body(self, arm: str) -> dict[str, Any]:
        """What goes into every request of an arm."""
        return {"kv_cache": {"fidelity": self.fidelity}} if self.fidelity and arm != DEFAULTS else {}


def _short(rng: random.Random, text: Words) -> Workload:
    return long_document_qa(
        rng, text, documents=12, document_tokens=400, shortest_document_tokens=60, question_tokens=20,
        shortest_question_tokens=5, answer_tokens=rng.randint(12, 20), repeats=1, concurrency=4,
    )  # fmt: skip


def _chat(rng: random.Random, text: Words) -> Workload:
    return multi_round_qa(
        rng, text, users=4, rounds=4, system_tokens=rng.randint(40, 120), history_tokens=rng.randint(150, 500),
        question_tokens=rng.randint(10, 40), answer_tokens=rng.randint(40, 90), concurrency=2,
    )  # fmt: skip


def _documents(rng: random.Random, text: Words) -> Workload:
    return long_document_qa(
        rng, text, documents=5, document_tokens=1_400, shortest_document_tokens=700, question_tokens=40,
        shortest_question_tokens=10, answer_tokens=rng.randint(12, 20), repeats=2, concurrency=2,
    )  # fmt: skip


def _retrieved(rng: random.Random, text: Words) -> Workload:
    return rearranged_chunks(
        rng, text, documents=6, chunks=4, document_tokens=350, shortest_document_tokens=200, system_tokens=60,
        shortest_system_tokens=30, question_tokens=30, answer_tokens=rng.randint(12, 20), appearances=8, concurrency=1,
    )  # fmt: skip


USES = {
    use.scenario: use
    for use in (
        Use("short", _short, judges_all=True),
        Use("chat", _chat),
        Use("long-document", _documents),
        Use("rag", _retrieved, fidelity="blended"),
        Use("cross-node", _documents, cools=True),
        Use("cost", _documents, fidelity="tolerant", cools=True),
    )
}
