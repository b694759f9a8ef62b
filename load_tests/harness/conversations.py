"""Random multi-turn conversations against a running server, with the cache disturbed between the turns.

Prompts and answers are token ids (`/v1/completions` with `return_token_ids`), so that two servers can be compared token
by token. Text comes from the demo model's worlds; any model can tokenize it.
"""

from __future__ import annotations

import asyncio
import textwrap
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from random import Random
from typing import Any

from load_tests.harness.client import COMPLETIONS, Client, StatusError, pinned
from models.training import worlds

TIERS = ("device", "cpu", "redis")
_CLEAR_AGAIN_S = 0.05
SHORTEST_PROMPT_TOKENS = 10
REQUEST_TIMEOUT_S = 300.0
TOKENIZED_CHARACTERS = 4000


@dataclass(frozen=True)
class Plan:
    """How many conversations, how long, how many at once, and how often a tier is cleared before a turn."""

    conversations: int = 100
    turns: int = 3
    longest_prompt_tokens: int = 3000
    answer_tokens: tuple[int, int] = (8, 72)
    question_tokens: tuple[int, int] = (4, 60)
    at_once: int = 6
    clear_probability: float = 0.25
    cleared: tuple[str, ...] = TIERS
    """Among these tiers, one to all of them are cleared."""
    replicas: int = 2
    pinned: bool = True
    """Two of three turns name the replica that they want. Without, the same is asked of a server with one replica."""
    part_probability: float = 0.0
    """That a turn leaves the conversation so far at any token, as another question about the same document does."""
    seed: int = 0


@dataclass(frozen=True)
class Turn:
    """One request: what was asked, what came, and where the prompt's KV came from (`usage.kv_cache`)."""

    prompt: list[int]
    answer: list[int]
    logprobs: list[float]
    kv_cache: dict[str, Any] = field(default_factory=dict)


async def run(url: str, model: str, plan: Plan, on_turn: Callable[[], None] = lambda: None) -> list[Turn]:
    """All turns of all conversations. Raises StatusError when the server refuses one."""
    async with Client(url, model, timeout_s=REQUEST_TIMEOUT_S) as client:
        words = await tokenize(client, text(Random(plan.seed), 4 * plan.longest_prompt_tokens))
        places = asyncio.Semaphore(plan.at_once)

        async def one(number: int) -> list[Turn]:
            async with places:
                return await _converse(client, plan, Random(f"{plan.seed}/{number}"), words, on_turn)

        return [turn for turns in await asyncio.gather(*map(one, range(plan.conversations))) for turn in turns]


async def complete(client: Client, prompt: list[int], max_tokens: int, pin: int | None = None) -> Turn:
    """One greedy completion of exactly `max_tokens` tokens."""
    body = client.completion(prompt, max_tokens, logprobs=1, return_token_ids=True)
    found = await client.post(COMPLETIONS, body, pinned(pin))
    choice = found["choices"][0]
    return Turn(prompt, choice["token_ids"], choice["logprobs"]["token_logprobs"], found["usage"].get("kv_cache", {}))


async def clear(client: Client, tiers: list[str]) -> None:
    """Empty tiers of the server, one conversation after the other: it takes one clear at a time."""
    while True:
        try:
            await client.post("/api/v1/kv/clear", {"tiers": tiers})
            return
        except StatusError as error:
            if error.status != HTTPStatus.TOO_MANY_REQUESTS:
                raise
        await asyncio.sleep(_CLEAR_AGAIN_S)


async def _converse(
    client: Client, plan: Plan, rng: Random, words: list[int], on_turn: Callable[[], None]
) -> list[Turn]:
    # Lengths spread evenly over the orders of magnitude; conversations share beginnings, or nothing would be reused.
    ratio = plan.longest_prompt_tokens / SHORTEST_PROMPT_TOKENS
    length = int(SHORTEST_PROMPT_TOKENS * ratio ** rng.random())
    start = rng.choice((0, 0, rng.randrange(len(words) - plan.longest_prompt_tokens)))
    prompt, turns = words[start : start + length], []
    disturbance = Random(rng.random())  # of its own: whatever is cleared, the same is asked
    for _ in range(plan.turns):
        if disturbance.random() < plan.clear_probability:
            await clear(client, disturbance.sample(plan.cleared, disturbance.randint(1, len(plan.cleared))))
        pin = rng.choice((None, *range(plan.replicas)))
        turn = await complete(client, prompt, rng.randint(*plan.answer_tokens), pin if plan.pinned else None)
        on_turn()
        turns.append(turn)
        question = rng.randrange(len(words) - plan.question_tokens[1])
        so_far = prompt + turn.answer
        if plan.part_probability and rng.random() < plan.part_probability:
            so_far = so_far[: rng.randrange(1, len(so_far))]
        prompt = so_far + words[question : question + rng.randint(*plan.question_tokens)]
    return turns


async def tokenize(client: Client, prompt: str) -> list[int]:
    """The server's tokens of a text, asked for in parts: it takes none that is longer than the model's context."""
    tokens: list[int] = []
    for part in textwrap.wrap(prompt, TOKENIZED_CHARACTERS, drop_whitespace=False):
        body = {"model": client.model, "prompt": part, "add_special_tokens": False}
        tokens += (await client.post("/tokenize", body))["tokens"]
    return tokens


def text(rng: Random, tokens: int) -> str:
    """Return at least `tokens` tokens of the demo model's language."""
    sentences: list[str] = []
    while len(sentences) * worlds.PERSON_FACT_TOKENS < tokens:
        world = worlds.generate(rng, 600)
        sentences += [s for name, facts in world.people.items() for s in worlds.person_sentences(name, facts)]
        sentences += [worlds.item_sentence(item) for item in world.items]
    return " ".join(sentences)
