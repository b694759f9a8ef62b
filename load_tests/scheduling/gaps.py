"""Answers that stream while long prompts arrive: how long one waits for the next token, how long for a first one."""

from __future__ import annotations

import asyncio
import contextlib
import random
import statistics
import time
from dataclasses import dataclass
from itertools import pairwise

from load_tests.harness.client import COMPLETIONS, Client
from load_tests.measuring.spread import percentile

STREAMS, ANSWER = 3, 500
LONG_PROMPT, LONG_ANSWER = 1_600, 2


@dataclass(frozen=True)
class Gaps:
    """Seconds between the tokens of a stream while a long prompt is under way, and the prompts' own first tokens."""

    quiet_p50_s: float
    """While no prompt is."""
    p50_s: float
    p99_s: float
    most_s: float
    ttft_s: float
    """Mean."""
    counted: int


def _prompt(draw: random.Random, tokens: int) -> list[int]:
    return [draw.randrange(10, 500) for _ in range(tokens)]


async def measure_gaps(url: str, model: str, seed: int, prompts: int) -> Gaps:
    """`STREAMS` answers, and `prompts` long prompts, one after the other, with a breath between. Raises ServerError."""
    draw = random.Random(f"gaps {seed}")
    arrivals: list[list[float]] = [[] for _ in range(STREAMS)]
    busy: list[tuple[float, float]] = []
    ended = asyncio.Event()
    async with Client(url, model) as client:

        async def stream(number: int, tokens: list[int]) -> None:
            while not ended.is_set():
                arrivals[number].append(float("nan"))  # a new answer: no gap to the one before
                body = client.completion(tokens, ANSWER, stream=True)
                async with contextlib.aclosing(client.events(COMPLETIONS, body)) as events:
                    async for _ in events:
                        arrivals[number].append(time.perf_counter())
                        if ended.is_set():
                            return

        async def long(tokens: list[int]) -> float:
            began = time.perf_counter()
            first = 0.0
            async for _ in client.events(COMPLETIONS, client.completion(tokens, LONG_ANSWER, stream=True)):
                first = first or time.perf_counter()
            busy.append((began, first))
            return first - began

        streams = [asyncio.create_task(stream(n, _prompt(draw, 40))) for n in range(STREAMS)]
        await asyncio.sleep(1.5)
        ttft = []
        for _ in range(prompts):
            ttft.append(await long(_prompt(draw, LONG_PROMPT)))
            await asyncio.sleep(draw.uniform(0.1, 0.4))
        ended.set()
        await asyncio.gather(*streams)
    quiet: list[float] = []
    disturbed: list[float] = []
    for one in arrivals:
        for before, at in pairwise(one):
            gap = at - before
            if gap != gap:
                continue
            (disturbed if any(begin <= at and before <= end for begin, end in busy) else quiet).append(gap)
    return Gaps(
        quiet_p50_s=statistics.median(quiet),
        p50_s=statistics.median(disturbed),
        p99_s=percentile(disturbed, 99),
        most_s=max(disturbed),
        ttft_s=statistics.mean(ttft),
        counted=len(disturbed),
    )
