"""One round: documents are computed, cool to Redis, and come back from there; every question is asked before and after.

Before, the answers come from KV as it was computed, the first one's on the way and the others' on the device. After,
they come from what Redis gave back: so each pair of answers tells what storing changed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from load_tests.harness.answers import Answer
from load_tests.harness.client import ServerError
from load_tests.micro.sparse_hit.talks import Talk

LEAST_REUSED = 0.6
"""Of a prompt's tokens; with less from Redis, a hit is none, and nothing was measured."""
ALL_TIERS = ("device", "cpu", "redis")

Tokens = Callable[[str], Sequence[int]]


class Server(Protocol):
    """See `load_tests.micro.sparse_hit.client.Cooling`."""

    def ask(self, request: dict[str, object]) -> Answer: ...  # noqa: D102

    def cool(self) -> int: ...  # noqa: D102

    def forget(self, *tiers: str) -> None: ...  # noqa: D102


@dataclass(frozen=True)
class Round:
    """One talk on one server."""

    computed_s: float
    """To the first token of the first question, nothing stored."""
    hit_s: float
    """The same question's, its documents in Redis alone."""
    reused: float
    """The part of that prompt that came from Redis."""
    redis_bytes: int
    prompt_tokens: int
    answers: int
    equal: int
    same_tokens: float
    """Of the answers' tokens, those before the first difference."""
    right_before: int
    right_after: int
    lost: int
    """Answers that were right before, and are wrong after."""


@dataclass
class Level:
    """The rounds of one `kv.sparse`."""

    rounds: list[Round] = field(default_factory=list)

    def values(self, name: str) -> list[float]:
        """One of a round's numbers, round by round."""
        return [float(getattr(one, name)) for one in self.rounds]

    def total(self, name: str) -> int:
        """Its sum."""
        return round(sum(self.values(name)))


def one_round(server: Server, talk: Talk, tokens: Tokens) -> Round:
    """Raises ServerError where something was reused that should have been computed, or computed that should not."""
    server.forget(*ALL_TIERS)
    before = [server.ask(request) for request in talk.requests]
    computed = before[0]
    if computed.kv_cache.get("recomputed", 0) != computed.prompt_tokens:
        raise ServerError(f"documents that are new were found: {computed.kv_cache}")
    redis_bytes = server.cool()
    server.forget("device", "cpu")
    after = [server.ask(request) for request in talk.requests]
    hit = after[0]
    hit_tokens, from_redis = hit.prompt_tokens or 0, int(hit.kv_cache.get("redis", 0))
    if from_redis < LEAST_REUSED * hit_tokens:
        raise ServerError(f"of {hit_tokens} tokens Redis gave too few: {hit.kv_cache}")
    right = [_right(one, answer) for one, answer in zip(before, talk.answers, strict=True)]
    still = [_right(one, answer) for one, answer in zip(after, talk.answers, strict=True)]
    same = [same_share(tokens(one.text), tokens(other.text)) for one, other in zip(before, after, strict=True)]
    return Round(
        computed_s=computed.first_text_s,
        hit_s=hit.first_text_s,
        reused=from_redis / hit_tokens,
        redis_bytes=redis_bytes,
        prompt_tokens=hit_tokens,
        answers=len(after),
        equal=sum(one.text == other.text for one, other in zip(before, after, strict=True)),
        same_tokens=sum(same) / len(same),
        right_before=sum(right),
        right_after=sum(still),
        lost=sum(was and not now for was, now in zip(right, still, strict=True)),
    )


def same_share(one: Sequence[int], other: Sequence[int]) -> float:
    """The part of two answers before their first difference; 1 for equal ones."""
    same = 0
    for mine, theirs in zip(one, other, strict=False):
        if mine != theirs:
            break
        same += 1
    return same / max(len(one), len(other), 1)


def _right(asked: Answer, answer: str | None) -> bool:
    return answer is not None and asked.text.strip() == answer.strip()
