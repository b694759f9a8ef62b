"""The workloads at each size of the working set, in proportion to the device pools.

The prefix that returns is a quarter of one replica's pool, whatever the pool is, or, in long-document QA, of a random
length: the number of documents, users or groups, and with it the number of requests, follows from the working set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from load_tests.bench.plan import Plan, Sizes
from load_tests.harness.models import SHAPES
from load_tests.workloads import Words, Workload, with_working_set
from load_tests.workloads.limits import MESSAGE_TOKENS

PREFIXES_PER_POOL = 4
RETURNS = 3
"""How often a document, a conversation or a group is come back to."""
QUESTION_TOKENS, ANSWER_TOKENS = 24, 16
DRAWN_CHUNK_TOKENS, CHUNKS = (424, 600), 6
"""Of a prompt whose chunks stand in a new order; shorter where a pool has no room for this many."""
DRAWN_DOCUMENT_TOKENS, DRAWN_QUESTION_TOKENS = (300, 3_000), (10, 120)
"""Between these, where lengths are random; documents no longer than a pool has room for."""
CONCURRENCY = 4
PARAMETERS_PER_RATE = 8e7
"""Parameters of a model that is sent one request per second, a larger one fewer, where requests come by time."""
_TRACE_RATE = 3.3
"""Requests per second in Mooncake's conversation trace."""
_LONGEST_IN_TRACE_BLOCKS = 256


@dataclass(frozen=True)
class Case:
    """A workload and the working set that was asked for, over the device pools of all replicas."""

    workload: Workload
    working_set: float


def make_cases(plan: Plan, model: str, text: Words, seed: str) -> list[Case]:
    """Every workload at every size; no two have a text in common. Raises ValueError for what cannot be."""
    pools = plan.sizes.replicas * plan.sizes.pool_tokens
    return [
        Case(
            with_working_set(
                name,
                f"{seed}/{name}/{size}",
                text,
                round(size * pools),
                **parameters_of(name, plan.sizes, size, request_rate(plan.sizes, model)),
            ),
            size,
        )
        for name in plan.workloads
        for size in plan.working_sets
    ]


def request_rate(sizes: Sizes, model: str) -> float:
    """Requests per second, where they come by time."""
    return sizes.requests_per_s or PARAMETERS_PER_RATE / SHAPES[model].parameters


def drawn_lengths(sizes: Sizes, working_set: float) -> dict[str, Any]:
    """Parameters of documents and questions of random lengths, and how many documents are about a working set."""
    shortest, longest = DRAWN_DOCUMENT_TOKENS
    shortest_question, question = DRAWN_QUESTION_TOKENS
    longest = min(longest, sizes.max_model_len - question - ANSWER_TOKENS - 3 * MESSAGE_TOKENS)
    shortest = min(shortest, longest)
    return {
        "documents": max(1, round(2 * working_set * sizes.replicas * sizes.pool_tokens / (shortest + longest))),
        "document_tokens": longest,
        "shortest_document_tokens": shortest,
        "question_tokens": question,
        "shortest_question_tokens": shortest_question,
    }


def rearranged(sizes: Sizes, working_set: float) -> dict[str, Any]:
    """Parameters of prompts of six chunks in new orders, of documents that are about a working set."""
    question, system = 60, 128
    room = sizes.max_model_len - question - system - ANSWER_TOKENS - (CHUNKS + 3) * MESSAGE_TOKENS
    shortest, longest = DRAWN_CHUNK_TOKENS
    scale = min(1.0, room / CHUNKS / longest)
    shortest, longest = int(scale * shortest), int(scale * longest)
    documents = round(2 * working_set * sizes.replicas * sizes.pool_tokens / (shortest + longest))
    return {
        "documents": max(CHUNKS, documents),
        "chunks": CHUNKS,
        "document_tokens": longest,
        "shortest_document_tokens": shortest,
        "system_tokens": system,
        "question_tokens": question,
        "appearances": 1 + RETURNS,
        "answer_tokens": ANSWER_TOKENS,
        "concurrency": CONCURRENCY,
    }


def parameters_of(name: str, sizes: Sizes, working_set: float, rate: float) -> dict[str, Any]:
    """A maker's parameters for pools of this size; `with_working_set` corrects the number of prefixes."""
    prefix = sizes.pool_tokens // PREFIXES_PER_POOL
    prefixes = max(1, round(working_set * sizes.replicas * PREFIXES_PER_POOL))
    longest = {"max_model_tokens": sizes.max_model_len}
    texts = {"question_tokens": QUESTION_TOKENS, "answer_tokens": ANSWER_TOKENS, **longest}
    if name == "long-document-qa":
        documents = {"documents": prefixes, "document_tokens": prefix, **texts}
        if sizes.lengths == "random":
            documents |= drawn_lengths(sizes, working_set)
        return {**documents, "repeats": RETURNS, "concurrency": CONCURRENCY}
    if name == "rearranged-chunks":
        return {**rearranged(sizes, working_set), **longest}
    if name == "multi-round-qa":
        system = prefix // 4
        users = {"users": prefixes, "system_tokens": system, "history_tokens": prefix - system}
        loop = {"qps": rate} if sizes.requests_per_s else {"concurrency": CONCURRENCY}
        return {**users, "rounds": 1 + RETURNS, **loop, **texts}
    if name == "shared-prefix-groups":
        steps = (0.5, 1.0, 1.5)  # of the rate: a staircase
        stage_s = prefixes * (1 + RETURNS) / rate / sum(steps)
        groups = {"groups": prefixes, "prompts_per_group": 1 + RETURNS, "system_tokens": prefix}
        return {**groups, "rates": [step * rate for step in steps], "stage_s": stage_s, **texts}
    if name == "straggler-burst":
        short = 8
        return {
            "bursts": RETURNS,
            "between_bursts_s": (short + prefixes) / rate,
            "short_requests": short,
            "long_requests": max(1, prefixes // 2),
            "system_tokens": prefix // 8,
            "short_tokens": QUESTION_TOKENS,
            "long_tokens": 2 * prefix,
            "answer_tokens": ANSWER_TOKENS,
            **longest,
        }
    return {
        "requests": prefixes * (1 + RETURNS),
        "block_tokens": max(1, sizes.max_model_len // _LONGEST_IN_TRACE_BLOCKS),
        "rate_scale": rate / _TRACE_RATE,
        **longest,
    }
