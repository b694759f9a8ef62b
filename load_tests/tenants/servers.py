"""The servers of the three questions, and what their arms measure."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from random import Random
from typing import Any

from load_tests.harness.client import Client
from load_tests.harness.conversations import text
from load_tests.harness.server import RunningServer
from load_tests.measuring.spread import percentile
from load_tests.tenants.load import MODEL, Done, Sizes, Tenant, arrivals, closed_loop, flooding
from load_tests.tenants.shares import window_ratios

A, B = "a", "b"
KEYS = {A: "key-of-a", B: "key-of-b"}
SMALL, LARGE = Sizes((40, 200), (4, 24)), Sizes((200, 600), (24, 96))
_WORDS = 40_000
_LEAD_S = 2.0


@dataclass(frozen=True)
class Scenario:
    """`slots`: sequences that an engine computes at once; `flood`: requests that a flooding tenant has under way."""

    replicas: int = 1
    slots: int = 4
    flood: int = 24
    modest_per_s: float = 2.0
    modest_s: float = 12.0
    throughput_s: float = 10.0
    shares_s: float = 66.0
    weights: tuple[float, ...] = field(default=(1.0, 2.0))
    """Of the first tenant, one for each run; the second's is 1."""

    def settings(self, tenants: int = 2, weight: float = 1.0) -> dict[str, Any]:
        """What a server is started with; with one tenant, both keys are its own."""
        names = {A: A, B: B} if tenants > 1 else {A: A, B: A}
        keys = {KEYS[who]: name for who, name in names.items()}
        return {
            "replicas": self.replicas,
            "engine": {"max_num_seqs": self.slots, "enforce_eager": True, "threads": 1},
            "kv": {"redis_url": None},
            "http": {"api_keys": keys},
            "tenants": {A: {"weight": weight}},
        }


class Tenants:
    """Two clients of one server, with the words that their prompts are made of."""

    def __init__(self, server: RunningServer, scenario: Scenario, seed: int) -> None:
        self._url = server.url
        self._scenario = scenario
        self._rng = Random(seed)
        self._words = asyncio.run(_tokenize(server.url, text(Random(seed), _WORDS)))

    def modest(self, beside: int) -> float:
        """The 95th percentile of a modest tenant's requests, in seconds; the other one keeps `beside` under way."""

        async def run() -> list[Done]:
            async with Client(self._url, MODEL) as client:
                modest, flood = self._tenant(client, A, SMALL), self._tenant(client, B, LARGE)
                plan = self._scenario

                async def ask() -> list[Done]:
                    return await arrivals(modest, plan.modest_per_s, plan.modest_s)

                return await (flooding(flood, beside, ask, _LEAD_S) if beside else ask())

        return percentile([done.seconds for done in asyncio.run(run())], 95)

    def throughput(self) -> float:
        """Cost per second of both together, when both always wait."""
        seconds = self._scenario.throughput_s
        served = asyncio.run(self._both(seconds))
        return sum(done.cost for several in served.values() for done in several) / seconds

    def shares(self, weight: float) -> list[float]:
        """In each window, the cost ÷ weight of the one over that of the other, when both always wait."""
        began = time.monotonic()
        served = asyncio.run(self._both(self._scenario.shares_s))
        return window_ratios(served, {A: weight}, began + _LEAD_S, began + self._scenario.shares_s)

    async def _both(self, seconds: float) -> Mapping[str, list[Done]]:
        async with Client(self._url, MODEL) as client:
            one, other = self._tenant(client, A, SMALL), self._tenant(client, B, LARGE)
            at_once = self._scenario.flood
            found = await asyncio.gather(closed_loop(one, at_once, seconds), closed_loop(other, at_once, seconds))
        return dict(zip((A, B), found, strict=True))

    def _tenant(self, client: Client, who: str, sizes: Sizes) -> Tenant:
        return Tenant(client, KEYS[who], sizes, self._words, Random(self._rng.random()))


async def _tokenize(url: str, words: str) -> list[int]:
    found: list[int] = []
    async with Client(url, MODEL, KEYS[A]) as client:
        for start in range(0, len(words), 2000):
            part = {"model": MODEL, "prompt": words[start : start + 2000]}
            found += (await client.post("/tokenize", part))["tokens"]
    return found
