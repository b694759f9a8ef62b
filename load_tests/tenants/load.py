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

import httpx

from kvmanager.scheduling.virtual_counters import ANSWER_COST, prompt_cost
from load_tests.harness.server import ServerError

MODEL = "demo"
REQUEST_S = 300.0
_CONNECTIONS = 256


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
class Client:
    """Who asks, with which key, for what. `words`: the tokens that prompts are taken of."""

    http: httpx.AsyncClient
    key: str
    sizes: Sizes
    words: list[int]
    rng: Random

    async def ask(self) -> Done:
        """One request to its end. Raises ServerError for one that is not answered."""
        length, answer = self.rng.randint(*self.sizes.prompt), self.rng.randint(*self.sizes.answer)
        start = self.rng.randrange(len(self.words) - length)
        body = {
            "model": MODEL,
            "prompt": self.words[start : start + length],
            "max_tokens": answer,
            "temperature": 0,
            "ignore_eos": True,
        }
        began = time.monotonic()
        response = await self.http.post("/v1/completions", json=body, headers={"authorization": f"Bearer {self.key}"})
        ended = time.monotonic()
        if response.is_error:
            raise ServerError(f"a request was not answered: {response.status_code} {response.text[:500]}")
        usage = response.json()["usage"]
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        cost = prompt_cost(length, cached) + ANSWER_COST * usage["completion_tokens"]
        return Done(ended, ended - began, cost, usage["completion_tokens"])


def connection(url: str) -> httpx.AsyncClient:
    """For all clients of one run."""
    limits = httpx.Limits(max_connections=_CONNECTIONS, max_keepalive_connections=_CONNECTIONS)
    return httpx.AsyncClient(base_url=url, timeout=REQUEST_S, limits=limits)


async def closed_loop(client: Client, at_once: int, seconds: float) -> list[Done]:
    """So many requests under way all the time, until all are answered; the result has those that end in time."""
    end, done = time.monotonic() + seconds, list[Done]()

    async def one() -> None:
        while time.monotonic() < end:
            answered = await client.ask()
            if answered.ended <= end:
                done.append(answered)

    await asyncio.gather(*(one() for _ in range(at_once)))
    return done


async def arrivals(client: Client, per_s: float, seconds: float) -> list[Done]:
    """Poisson arrivals for so long; waits until all are answered."""
    tasks: list[asyncio.Task[Done]] = []
    end = time.monotonic() + seconds
    while (pause := client.rng.expovariate(per_s)) + time.monotonic() < end:
        await asyncio.sleep(pause)
        tasks.append(asyncio.create_task(client.ask()))
    return list(await asyncio.gather(*tasks))


async def flooding(
    flood: Client, at_once: int, modest: Callable[[], Awaitable[list[Done]]], lead_s: float
) -> list[Done]:
    """What `modest` gives while `flood` keeps so many requests under way, from `lead_s` before on.

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
