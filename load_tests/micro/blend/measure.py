"""The questions: first tokens, cold and warm; a neighbour's gaps; contexts that come in every order.

Arms take turns within a round, and each round has documents of its own.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from load_tests.harness.answers import Answer
from load_tests.harness.client import Measured, ServerError, run_workload
from load_tests.harness.server import RunningServer
from load_tests.measuring.spread import Spread
from load_tests.measuring.turns import rotated
from load_tests.micro.blend.client import EXACT, Blends, blended, blended_share, gaps_within
from load_tests.micro.blend.prompts import Prompts
from load_tests.workloads import Words, rearranged_chunks

FULL, COLD = "full prefill", "cold, fill: first"
ALONE, BESIDE_BLEND, BESIDE_FULL = "alone", "with a blend", "with a prefill"
ALONE_TOKENS, BETWEEN_TOKENS = 40, 8
"""A neighbour's, before the first arm and between two."""
FEWEST_BLENDED = 0.5
"""The least share, of the tokens that a ratio leaves to be reused, that must really have been blended."""
CONTEXTS, PERMUTATIONS = 5, 10
CONTEXT_TOKENS, CONTEXT_SYSTEM_TOKENS = (4_600, 5_400), (950, 1_050)

Advance = Callable[[], object]


def arm_of(ratio: float) -> str:
    """Return the name of the arm that blends and recomputes this share of the reused tokens."""
    return f"blended, {100 * ratio:g} %"


@dataclass
class FirstTokens:
    """Seconds to the first token by arm, one value a round, and what each answer said of its prompt."""

    seconds: dict[str, list[float]] = field(default_factory=dict)
    asked: dict[str, list[Answer]] = field(default_factory=dict)

    def add(self, arm: str, asked: Answer) -> None:
        """One answer."""
        self.seconds.setdefault(arm, []).append(asked.first_text_s)
        self.asked.setdefault(arm, []).append(asked)

    def blended_share(self, arm: str) -> Spread:
        """Of the prompts' tokens."""
        return Spread.of([blended_share(one) for one in self.asked[arm]])


async def first_tokens(
    client: Blends, prompts: Prompts, ratios: list[float], rounds: int, advance: Advance
) -> FirstTokens:
    """The cold prompt of each round stores its documents; the other arms ask about them in new orders.

    A round before the first does not count. Raises ServerError where a blend was none.
    """
    found = FirstTokens()
    arms = {FULL: EXACT, **{arm_of(ratio): blended(ratio) for ratio in ratios}}
    for number in range(-1, rounds):
        documents = prompts.documents()
        cold = await client.ask(prompts.prompt(documents), blended(ratios[0]))
        answers = {COLD: cold}
        advance()
        for arm in rotated(list(arms), max(0, number)):
            await client.rest()
            answers[arm] = await client.ask(prompts.prompt(documents), arms[arm])
            advance()
        for ratio in ratios if number >= 0 else ():
            require_blended(answers[arm_of(ratio)], ratio)
        for arm, asked in answers.items() if number >= 0 else ():
            found.add(arm, asked)
    return found


def require_blended(asked: Answer, ratio: float) -> None:
    """Raises ServerError, with the server's account, where less was blended than `FEWEST_BLENDED` of what can be."""
    if blended_share(asked) < FEWEST_BLENDED * (1 - ratio):
        raise ServerError(
            f"Of {asked.prompt_tokens} tokens {asked.kv_cache.get('blended', 0)} were blended: {asked.kv_cache}."
        )


async def neighbour_gaps(
    client: Blends, prompts: Prompts, ratio: float, rounds: int, longest: int, advance: Advance
) -> dict[str, list[list[float]]]:
    """Return seconds between a decoding stream's tokens: by what ran at the same time, the gaps of each round.

    `longest`: tokens that the stream is asked for, as many as the model has room for.
    """
    found: dict[str, list[list[float]]] = {ALONE: [], BESIDE_BLEND: [], BESIDE_FULL: []}
    for number in range(rounds):
        documents = prompts.documents()
        await client.ask(prompts.prompt(documents), blended(ratio))  # stores them
        await client.rest()
        async with client.neighbour(prompts.alone(), longest) as neighbour:
            await neighbour.tokens(BETWEEN_TOKENS)
            windows = {ALONE: time.perf_counter()}
            await neighbour.tokens(ALONE_TOKENS)
            found[ALONE].append(gaps_within(neighbour.times, windows[ALONE], time.perf_counter()))
            for arm in rotated([BESIDE_BLEND, BESIDE_FULL], number):
                began = time.perf_counter()
                kv_cache = blended(ratio) if arm == BESIDE_BLEND else EXACT
                asked = await client.ask(prompts.prompt(documents), kv_cache)
                ended = time.perf_counter()
                if arm == BESIDE_BLEND:
                    require_blended(asked, ratio)
                await neighbour.tokens(BETWEEN_TOKENS)
                found[arm].append(gaps_within(neighbour.times, began, ended))
                advance()
    return found


@dataclass(frozen=True)
class Hits:
    """Of prompts with all contexts in ever new orders; by usage, where nothing that is found is recomputed.

    The first prompt finds nothing, by definition: what its chunks were computed for is it.
    """

    prompts: int
    prompt_tokens: int
    reused_tokens: int
    by_prompt: list[float]
    of_chunks: float | None
    """The server's own rate, which counts what was computed for a prompt before it was planned; None: not said."""

    @property
    def rate(self) -> float:
        """Tokens reused over all prompt tokens."""
        return self.reused_tokens / self.prompt_tokens


async def hit_rate(server: RunningServer, model: str, text: Words, seed: str, done: Advance) -> Hits:
    """Contexts in every order, one prompt after the other. Raises ServerError where one is not answered."""
    workload = rearranged_chunks(
        random.Random(seed),
        text,
        documents=CONTEXTS,
        chunks=CONTEXTS,
        appearances=PERMUTATIONS,
        shortest_document_tokens=CONTEXT_TOKENS[0],
        document_tokens=CONTEXT_TOKENS[1],
        shortest_system_tokens=CONTEXT_SYSTEM_TOKENS[0],
        system_tokens=CONTEXT_SYSTEM_TOKENS[1],
        answer_tokens=1,
        concurrency=1,
    )

    def on_done(_: Measured) -> None:
        done()

    body = {"kv_cache": blended(0.0)}
    measured = await run_workload(server.url, model, workload, on_done, extra_body=body)
    return hits(measured, _server_rate(server))


def hits(measured: list[Measured], of_chunks: float | None) -> Hits:
    """From the answers, the first one's prompt first. Raises ServerError where one failed."""
    failed = next((one.error for one in measured if one.error), None)
    if failed is not None:
        raise ServerError(f"A prompt of the hit rate was not answered: {failed}.")
    reused = [0, *(_reused(one.kv_cache or {}) for one in measured[1:])]
    tokens = [one.prompt_tokens for one in measured]
    shares = [part / whole for part, whole in zip(reused, tokens, strict=True)]
    return Hits(len(measured), sum(tokens), sum(reused), shares, of_chunks)


def _reused(kv_cache: dict[str, Any]) -> int:
    return sum(int(kv_cache.get(tier, 0)) for tier in ("device", "cpu", "redis"))


def _server_rate(server: RunningServer) -> float | None:
    found = [value for name, _, value in server.metrics() if name == "crosskv_blend_hit_rate"]
    return found[0] if found and not math.isnan(found[0]) else None
