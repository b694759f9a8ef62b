"""What the tenants' clients do: a closed loop that floods, or arrivals at random; and what each request took and cost.

Prompts are runs of one text from random places, so hardly one begins as another. Answers have the length that is asked
for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from random import Random

from kvmanager.scheduling.virtual_counters import ANSWER_COST, prompt_cost
from load_tests.harness.client import COMPLETIONS, Client

MODEL = "demo"


@dataclass(frozen=True)
class Sizes:
    """Least and most tokens of prompts and of answers."""

    prompt: tuple[int, int]
    answer: tuple[int, int]


@dataclass(frozen=True)
class Done:
    """One answered request; `ended` on `time.monotonic`'s clock."""

    ended: float
    seconds: float
    cost: float
    answer_tokens: int


@dataclass(frozen=True)
class Tenant:
    """A client with its key and its requests' sizes. `words`: the tokens that prompts are taken of."""

    client: Client
    key: str
    sizes: Sizes
    words: list[int]
    rng: Random

    async def ask(self) -> Done:
        """One request to its end. Raises ServerError for one that is not answered."""
        length, answer = self.rng.randint(*self.sizes.prompt), self.rng.randint(*self.sizes.answer)
        start = self.rng.randrange(len(self.words) - length)
        body = self.client.completion(self.words[start : start + length], answer)
        began = time.monotonic()
        usage = (await self.client.post(COMPLETIONS, body, self.key))["usage"]
        ended = time.monotonic()
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        cost = prompt_cost(length, cached) + ANSWER_COST * usage["completion_tokens"]
        return Done(ended, ended - began, cost, usage["completion_tokens"])


async def closed_loop(tenant: Tenant, at_once: int, seconds: float) -> list[Done]:
    """Keep `at_once` requests under way for `seconds`, and wait for all; return those that ended in that time."""
    end, done = time.monotonic() + seconds, list[Done]()

    async def one() -> None:
        while time.monotonic() < end:
            answered = await tenant.ask()
            if answered.ended <= end:
                done.append(answered)

    await asyncio.gather(*(one() for _ in range(at_once)))
    return done


async def arrivals(tenant: Tenant, per_s: float, seconds: float) -> list[Done]:
    """Send Poisson arrivals for `seconds`; wait until all are answered."""
    tasks: list[asyncio.Task[Done]] = []
    end = time.monotonic() + seconds
    while (pause := tenant.rng.expovariate(per_s)) + time.monotonic() < end:
        await asyncio.sleep(pause)
        tasks.append(asyncio.create_task(tenant.ask()))
    return list(await asyncio.gather(*tasks))


async def flooding(
    flood: Tenant, at_once: int, modest: Callable[[], Awaitable[list[Done]]], lead_s: float
) -> list[Done]:
    """Return what `modest` gives while `flood` keeps `at_once` requests under way, begun `lead_s` earlier.

    Ends when all are answered: what a client leaves behind would be in the way of the next arm.
    """
    stopped = asyncio.Event()

    async def one() -> None:
        while not stopped.is_set():
            await flood.ask()

    tasks = [asyncio.create_task(one()) for _ in range(at_once)]
    try:
        await asyncio.sleep(lead_s)
        return await modest()
    finally:
        stopped.set()
        await asyncio.gather(*tasks)
