"""Users in conversations, each with a long history of its own, behind one system prompt.

Source of the parameters: LMCache, ``benchmarks/multi_round_qa`` (github.com/LMCache/LMCache), as production-stack's
``benchmarks/multi-round-qa/run.sh`` calls it (github.com/vllm-project/production-stack): a system prompt of 1,000
tokens, a history of 20,000 tokens per user, answers of 100, questions of one sentence; users, rounds and rate as in
LMCache's own tests. A user asks every ``users / qps`` seconds, but not before the last answer has come; users arrive
one by one, evenly over the time that a conversation takes. There users keep arriving until the time is up and some are
in mid-conversation when it begins; here ``users`` users come, and every one stays for all rounds. With ``concurrency``
it is a closed loop instead: that many users at a time wait for an answer, and the user whose turn it is asks at once.
"""

from __future__ import annotations

import itertools
import random

from load_tests.workloads.limits import at_least, fits, positive
from load_tests.workloads.prefixes import mark_returning
from load_tests.workloads.words import Words
from load_tests.workloads.workload import Message, Request, Workload

NAME = "multi-round-qa"


def multi_round_qa(
    rng: random.Random,
    text: Words,
    *,
    users: int = 10,
    system_tokens: int = 1_000,
    history_tokens: int = 20_000,
    rounds: int = 5,
    question_tokens: int = 20,
    answer_tokens: int = 100,
    qps: float = 0.5,
    concurrency: int | None = None,
    max_model_tokens: int | None = None,
) -> Workload:
    """``users`` x ``rounds`` requests, each with its conversation so far. Raises ValueError for what cannot be.

    ``concurrency``: a closed loop of this many requests, and ``qps`` is ignored; None: requests come by time.
    """
    at_least(1, users=users, system_tokens=system_tokens, history_tokens=history_tokens, rounds=rounds)
    at_least(1, question_tokens=question_tokens, answer_tokens=answer_tokens)
    at_least(1, concurrency=1 if concurrency is None else concurrency)
    positive(qps=qps)
    asked_and_answered = rounds * question_tokens + (rounds - 1) * answer_tokens
    fits(
        system_tokens + history_tokens + asked_and_answered,
        2 * rounds,
        answer_tokens,
        max_model_tokens,
        "ask for a smaller history_tokens or fewer rounds",
    )
    system = Message("system", text(rng, system_tokens))
    conversations = [_questions(rng, text, history_tokens, rounds, question_tokens) for _ in range(users)]

    between_rounds_s = users / qps if concurrency is None else 0.0
    between_users_s = between_rounds_s * (rounds - 1) / users
    turns = sorted(
        (user * between_users_s + turn * between_rounds_s, turn, user)
        for user, turn in itertools.product(range(users), range(rounds))
    )
    numbers = {(user, turn): number for number, (_, turn, user) in enumerate(turns)}
    requests = [
        Request(
            number=number,
            session=f"user {user}",
            at_s=at_s,
            after=numbers[user, turn - 1] if turn else None,
            messages=(system, *_so_far(conversations[user], turn)),
            max_tokens=answer_tokens,
        )
        for number, (at_s, turn, user) in enumerate(turns)
    ]
    return Workload(NAME, mark_returning(requests, text.characters_per_token), concurrency, text.characters_per_token)


def _questions(
    rng: random.Random, text: Words, history_tokens: int, rounds: int, question_tokens: int
) -> list[Message]:
    """One user's, the history in front of the first."""
    history = text(rng, history_tokens)
    questions = [text(rng, question_tokens) for _ in range(rounds)]
    return [Message("user", f"{history}\n{questions[0]}"), *(Message("user", question) for question in questions[1:])]


def _so_far(questions: list[Message], turn: int) -> list[Message]:
    answer = Message("assistant", None)
    return [message for question in questions[:turn] for message in (question, answer)] + [questions[turn]]
