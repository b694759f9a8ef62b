"""Traces that mix what a device should keep with what it should not; random in every size, the same for a seed.

* *chat*: conversations of several rounds behind a few system prompts, which end some time; each round's prompt is the
  one before, its answer and a question.
* *docs*: questions about documents of fixed Zipf popularity.
* *scan*, *bursts*: long prompts that come once, evenly spread or a few crowds at a time.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

from load_tests.simulator.trace import BLOCK_TOKENS, TraceRequest

MIXES = ("chat", "chat+scan", "chat+bursts", "docs+scan", "chat+docs", "chat+docs+scan")


def mix(name: str, seed: int) -> list[TraceRequest]:
    """Return the trace of one of `MIXES`, in order of arrival."""
    rng, ids = random.Random(f"{name} {seed}"), itertools.count(1)
    trace = _chat(rng, ids)
    span_s = trace[-1].timestamp_s
    parts = name.split("+")
    if "chat" not in parts:
        trace = []
    if "docs" in parts:
        trace += _docs(rng, ids, span_s)
    if "scan" in parts:
        trace += _scan(rng, ids, [rng.uniform(0, span_s) for _ in range(rng.randint(100, 400))])
    if "bursts" in parts:
        begins = [rng.uniform(0, span_s) for _ in range(rng.randint(3, 8))]
        trace += _scan(
            rng, ids, [rng.choice(begins) + rng.uniform(0, span_s / 100) for _ in range(rng.randint(100, 400))]
        )
    return sorted(trace, key=lambda request: request.timestamp_s)


def blocks_of(trace: list[TraceRequest]) -> int:
    """Return how many different blocks a trace's prompts have."""
    return len({name for request in trace for name in request.hash_ids})


def _chat(rng: random.Random, ids: Iterator[int]) -> list[TraceRequest]:
    think_s, rounds = rng.choice((20.0, 60.0, 120.0)), rng.choice((2, 4, 8))
    systems = [_blocks(ids, 3) for _ in range(rng.randint(1, 8))]
    trace: list[TraceRequest] = []
    begins_s = 0.0
    for _ in range(rng.randint(300, 500)):
        begins_s += rng.expovariate(1.0)
        at_s, prompt = begins_s, (*rng.choice(systems), *_blocks(ids, rng.randint(2, 20)))
        for _ in range(1 + int(rng.expovariate(1 / (rounds - 1)))):
            answer = rng.randint(0, 2)
            trace.append(_request(at_s, prompt, answer))
            prompt = (*prompt, *_blocks(ids, answer + rng.randint(1, 4)))
            at_s += rng.lognormvariate(math.log(think_s), 0.8)
    return sorted(trace, key=lambda request: request.timestamp_s)


def _docs(rng: random.Random, ids: Iterator[int], span_s: float) -> list[TraceRequest]:
    documents = [_blocks(ids, rng.randint(20, 60)) for _ in range(rng.randint(20, 80))]
    skew = rng.uniform(0.6, 1.2)
    asked = rng.choices(documents, [(rank + 1) ** -skew for rank in range(len(documents))], k=rng.randint(300, 900))
    return [_request(rng.uniform(0, span_s), (*prompt, *_blocks(ids, rng.randint(1, 3)))) for prompt in asked]


def _scan(rng: random.Random, ids: Iterator[int], times_s: list[float]) -> list[TraceRequest]:
    return [_request(at_s, _blocks(ids, rng.randint(20, 60))) for at_s in times_s]


def _blocks(ids: Iterator[int], count: int) -> tuple[int, ...]:
    return tuple(itertools.islice(ids, count))


def _request(at_s: float, prompt: tuple[int, ...], answer_blocks: int = 0) -> TraceRequest:
    return TraceRequest(at_s, len(prompt) * BLOCK_TOKENS, answer_blocks * BLOCK_TOKENS, prompt)
