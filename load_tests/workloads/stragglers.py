"""Many short requests and a few very long ones at one instant: which wait for which?

The case that load-aware routers and chunked prefill are made for: a router that counts requests, not tokens, puts short
ones behind a long prefill. The bursts after the first bring the same long documents again, with other questions; the
short requests share a system prompt.
"""

from __future__ import annotations

import random

from load_tests.workloads.limits import at_least, fits, positive
from load_tests.workloads.prefixes import mark_returning
from load_tests.workloads.words import Words
from load_tests.workloads.workload import Message, Request, Workload

NAME = "straggler-burst"


def straggler_burst(
    rng: random.Random,
    text: Words,
    *,
    bursts: int = 3,
    between_bursts_s: float = 60.0,
    short_requests: int = 32,
    long_requests: int = 4,
    system_tokens: int = 256,
    short_tokens: int = 64,
    long_tokens: int = 16_000,
    answer_tokens: int = 64,
    max_model_tokens: int | None = None,
) -> Workload:
    """``bursts`` x (``short_requests`` + ``long_requests``) requests, in random order within a burst.

    A short prompt has ``system_tokens`` that all short ones share and ``short_tokens`` of its own, a long one
    ``long_tokens`` of a document and ``short_tokens`` of a question. Raises ValueError for what cannot be.
    """
    at_least(1, bursts=bursts, short_requests=short_requests, long_requests=long_requests)
    at_least(1, system_tokens=system_tokens, short_tokens=short_tokens, answer_tokens=answer_tokens)
    positive(between_bursts_s=between_bursts_s)
    if long_tokens <= system_tokens:
        raise ValueError(f"long_tokens must be more than the {system_tokens} of system_tokens, got {long_tokens}.")
    fits(long_tokens + short_tokens, 2, answer_tokens, max_model_tokens, "ask for a smaller long_tokens")
    shared = Message("system", text(rng, system_tokens))
    documents = [Message("system", text(rng, long_tokens)) for _ in range(long_requests)]
    requests: list[Request] = []
    for burst in range(bursts):
        heads = [(f"short {burst}.{number}", shared) for number in range(short_requests)]
        heads += [(f"long {number}", document) for number, document in enumerate(documents)]
        rng.shuffle(heads)
        requests += [
            Request(
                number=len(requests) + place,
                session=session,
                at_s=burst * between_bursts_s,
                after=None,
                messages=(head, Message("user", text(rng, short_tokens))),
                max_tokens=answer_tokens,
            )
            for place, (session, head) in enumerate(heads)
        ]
    return Workload(NAME, mark_returning(requests, text.characters_per_token), None, text.characters_per_token)
