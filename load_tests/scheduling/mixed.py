"""A saturated mixed load: one job in five is long. Which job waits for which is up to the server."""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from load_tests.harness.client import COMPLETIONS, Client
from load_tests.measuring.spread import percentile
from load_tests.scheduling.servers import SLOTS

LONG_SHARE = 0.2
LONG_PROMPT, LONG_ANSWER = (300, 700), (150, 300)
SHORT_PROMPT, SHORT_ANSWER = (20, 120), (4, 24)


@dataclass(frozen=True)
class MixedJob:
    """A prompt of random tokens, and how long its answer is; `wait` is exponential, of mean 1."""

    tokens: list[int]
    answer: int
    is_long: bool
    wait: float


@dataclass(frozen=True)
class Run:
    """Seconds, but `tokens_per_s`; `long_max_s` is the longest job's. `answers` are texts, in the order of the jobs."""

    mean_s: float
    p95_s: float
    short_p95_s: float
    short_mean_s: float
    long_max_s: float
    long_mean_s: float
    tokens_per_s: float
    makespan_s: float
    answers: list[str]

    def as_dict(self) -> dict[str, Any]:
        """For `--json`, without the answers."""
        return {name: value for name, value in asdict(self).items() if name != "answers"}


def jobs_of(seed: int, count: int) -> list[MixedJob]:
    """Equal seeds give equal jobs; no prompt begins as another one."""
    draw = random.Random(f"mixed {seed}")

    def job() -> MixedJob:
        is_long = draw.random() < LONG_SHARE
        prompt = draw.randrange(*(LONG_PROMPT if is_long else SHORT_PROMPT))
        answer = draw.randrange(*(LONG_ANSWER if is_long else SHORT_ANSWER))
        return MixedJob([draw.randrange(10, 500) for _ in range(prompt)], answer, is_long, draw.expovariate(1.0))

    return [job() for _ in range(count)]


async def _ask(client: Client, job: MixedJob) -> str:
    answer = await client.post(COMPLETIONS, client.completion(job.tokens, job.answer))
    return str(answer["choices"][0]["text"])


async def undisturbed(url: str, model: str, jobs: Sequence[MixedJob]) -> tuple[list[str], float]:
    """Return the answers where no job waits, and how many jobs a second that makes. Raises ServerError."""
    turn = asyncio.Semaphore(SLOTS)
    async with Client(url, model) as client:

        async def one(job: MixedJob) -> str:
            async with turn:
                return await _ask(client, job)

        began = time.perf_counter()
        answers = await asyncio.gather(*map(one, jobs))
        return list(answers), len(jobs) / (time.perf_counter() - began)


async def run_mixed(url: str, model: str, jobs: Sequence[MixedJob], per_s: float) -> Run:
    """Send each job when its time comes, whatever became of the others. Raises ServerError."""
    async with Client(url, model) as client:
        due, at = [], 0.0
        for job in jobs:
            at += job.wait / per_s
            due.append(at)
        began = time.perf_counter()

        async def one(job: MixedJob, due_s: float) -> tuple[float, str]:
            await asyncio.sleep(max(0.0, began + due_s - time.perf_counter()))
            text = await _ask(client, job)
            return time.perf_counter() - began - due_s, text

        found = await asyncio.gather(*(one(*pair) for pair in zip(jobs, due, strict=True)))
        makespan = time.perf_counter() - began
    took = [seconds for seconds, _ in found]
    short = [seconds for seconds, job in zip(took, jobs, strict=True) if not job.is_long]
    long = [seconds for seconds, job in zip(took, jobs, strict=True) if job.is_long]
    return Run(
        mean_s=statistics.mean(took),
        p95_s=percentile(took, 95),
        short_p95_s=percentile(short, 95),
        short_mean_s=statistics.mean(short),
        long_max_s=max(long),
        long_mean_s=statistics.mean(long),
        tokens_per_s=sum(job.answer for job in jobs) / makespan,
        makespan_s=makespan,
        answers=[text for _, text in found],
    )
