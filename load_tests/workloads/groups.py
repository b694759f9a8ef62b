"""Groups of prompts, each behind a system prompt of its own, at rates that climb a staircase.

Source of the parameters: llm-d-benchmark's profile ``shared_prefix_synthetic`` (github.com/llm-d/llm-d-benchmark), run
by inference-perf's ``shared_prefix`` generator (github.com/kubernetes-sigs/inference-perf): 2,048 tokens that a group
shares, 256 of a question, 256 of an answer, stages of 50 seconds at 2 to 20 requests a second. 50 groups of 5 in place
of its 32 of 32 are more prefixes and fewer repeats. Arrivals within a stage are a Poisson process, as in llm-d's
``guide_*`` profiles. When every prompt has been sent once they are sent again, in the same order.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence

from load_tests.workloads.limits import at_least, fits, positive
from load_tests.workloads.prefixes import mark_returning
from load_tests.workloads.words import Words
from load_tests.workloads.workload import Message, Request, Workload

NAME = "shared-prefix-groups"


def shared_prefix_groups(
    rng: random.Random,
    text: Words,
    *,
    groups: int = 50,
    prompts_per_group: int = 5,
    system_tokens: int = 2_048,
    question_tokens: int = 256,
    answer_tokens: int = 256,
    rates: Sequence[float] = (2, 5, 8, 10, 12, 15, 20),
    stage_s: float = 50.0,
    max_model_tokens: int | None = None,
) -> Workload:
    """About ``stage_s`` x the sum of ``rates`` requests, each one message of a shuffled list of prompts.

    ``rates`` are requests per second, a stage of ``stage_s`` seconds each. Raises ValueError for what cannot be, and
    when not one request falls into the stages.
    """
    at_least(1, groups=groups, prompts_per_group=prompts_per_group, system_tokens=system_tokens)
    at_least(1, question_tokens=question_tokens, answer_tokens=answer_tokens, stages=len(rates))
    positive(stage_s=stage_s, lowest_rate=min(rates))
    fits(system_tokens + question_tokens, 2, answer_tokens, max_model_tokens, "ask for a smaller system_tokens")
    prompts = _prompts(rng, text, groups, prompts_per_group, system_tokens, question_tokens)
    requests = [
        Request(
            number=number,
            session=session,
            at_s=at_s,
            after=None,
            messages=messages,
            max_tokens=answer_tokens,
        )
        for number, (at_s, (session, messages)) in enumerate(
            zip(_arrivals(rng, rates, stage_s), itertools.cycle(prompts), strict=False)
        )
    ]
    if not requests:
        raise ValueError("no request falls into the stages; ask for a greater stage_s or higher rates.")
    return Workload(NAME, mark_returning(requests, text.characters_per_token), None, text.characters_per_token)


def _prompts(
    rng: random.Random, text: Words, groups: int, prompts_per_group: int, system_tokens: int, question_tokens: int
) -> list[tuple[str, tuple[Message, ...]]]:
    prompts: list[tuple[str, tuple[Message, ...]]] = []
    for group in range(groups):
        system = Message("system", text(rng, system_tokens))
        for prompt in range(prompts_per_group):
            question = Message("user", text(rng, question_tokens))
            prompts.append((f"group {group}, prompt {prompt}", (system, question)))
    rng.shuffle(prompts)
    return prompts


def _arrivals(rng: random.Random, rates: Sequence[float], stage_s: float) -> Iterator[float]:
    for stage, rate in enumerate(rates):
        at_s = stage * stage_s + rng.expovariate(rate)
        while at_s < (stage + 1) * stage_s:
            yield at_s
            at_s += rng.expovariate(rate)
