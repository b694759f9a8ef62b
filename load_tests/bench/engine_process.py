"""Where a replica's engine computes, on a thread or in a process: `python -m load_tests.bench.engine_process`

A whole server in each mode, in turns, with the embedded model, whose steps are short: what the modes
differ in is the work beside them. Of each server:

* start: until /health is well; memory: PSS of all processes, and of the replica with its engine;
* one at a time: time to the first token of tiny prompts;
* many at once: the same, and requests per second;
* time per token of a few long answers, and the gaps between their tokens, while tiny requests come and go. Tokens that
  arrive together have no gap.

Ratios are of one round's servers.
"""

from __future__ import annotations

import asyncio
import itertools
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Annotated, Any

import httpx
import typer

from load_tests.harness.answers import events_async
from load_tests.harness.running_server import RunningServer, started
from load_tests.measuring import report
from load_tests.measuring.command import JsonFile, Rounds, out
from load_tests.measuring.processes import machine_line, use_by_process
from load_tests.measuring.spread import Spread, percentile, ratios

MODES = ("thread", "process")
PROMPT_TOKENS, ANSWER_TOKENS = 45, 16
ALONE, AT_ONCE = 24, 16
LONG_ANSWERS, LONG_TOKENS = 4, 400
ENGINE_TITLES = ("ray::ServeReplica:crosskv:Replica", "VLLM::EngineCore")
FIGURES = {
    "start, s": "start_s",
    "memory of all, MiB": "memory_mib",
    "replicas and engines, MiB": "replica_mib",
    "TTFT alone, ms": "ttft_alone_ms",
    "TTFT, 16 at once, ms": "ttft_at_once_ms",
    "requests/s, 16 at once": "requests_per_s",
    "time per token of long answers, ms": "tpot_ms",
    "gap between tokens, p95, ms": "gap_p95_ms",
    "gap between tokens, p99, ms": "gap_p99_ms",
}
_SEEDS = itertools.count(1)


async def stream(client: httpx.AsyncClient, answer_tokens: int) -> list[float]:
    """When each event with a token came, in seconds after the request was sent; of a prompt that nobody has sent."""
    draw = Random(next(_SEEDS))
    prompt = [draw.randrange(100, 500) for _ in range(PROMPT_TOKENS)]
    body = {
        "model": "demo", "prompt": prompt, "max_tokens": answer_tokens, "temperature": 0, "ignore_eos": True,
        "stream": True, "return_token_ids": True,
    }  # fmt: skip
    began, came = time.perf_counter(), list[float]()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for event in events_async(response):
            if event["choices"] and event["choices"][0].get("token_ids"):
                came.append(time.perf_counter() - began)
    return came


async def drive(url: str, requests: int) -> dict[str, float]:
    """The figures of a server that answers."""
    limits = httpx.Limits(max_connections=2 * AT_ONCE)
    async with httpx.AsyncClient(base_url=url, timeout=300, limits=limits) as client:
        await asyncio.gather(*(stream(client, ANSWER_TOKENS) for _ in range(2 * AT_ONCE)))  # warm up
        alone = [(await stream(client, ANSWER_TOKENS))[0] for _ in range(ALONE)]

        left = iter(range(requests))
        at_once: list[float] = []

        async def worker() -> None:
            at_once.extend([(await stream(client, ANSWER_TOKENS))[0] for _ in left])

        began = time.perf_counter()
        await asyncio.gather(*(worker() for _ in range(AT_ONCE)))
        requests_per_s = requests / (time.perf_counter() - began)

        answers = asyncio.gather(*(stream(client, LONG_TOKENS) for _ in range(LONG_ANSWERS)))

        async def come_and_go() -> None:
            while not answers.done():
                await stream(client, ANSWER_TOKENS)

        await asyncio.gather(answers, *(come_and_go() for _ in range(LONG_ANSWERS)))
        tpot = [(one[-1] - one[0]) / (len(one) - 1) for one in answers.result()]
        gaps = [later - sooner for one in answers.result() for sooner, later in itertools.pairwise(one)]
    found = {f"gap_p{percent}_ms": 1e3 * percentile(gaps, percent) for percent in (95, 99)}
    return {
        "ttft_alone_ms": 1e3 * percentile(alone, 50),
        "ttft_at_once_ms": 1e3 * percentile(at_once, 50),
        "requests_per_s": requests_per_s,
        "tpot_ms": 1e3 * percentile(tpot, 50),
        **found,
    }


def memory(server: RunningServer) -> dict[str, float]:
    """PSS in MiB."""
    found = use_by_process(server.launcher)
    replica = sum(use.pss_bytes for use in found if use.command.startswith(ENGINE_TITLES))
    return {"memory_mib": sum(use.pss_bytes for use in found) / 2**20, "replica_mib": replica / 2**20}


def measure(mode: str, replicas: int, requests: int) -> dict[str, float]:
    """One server, from its start to its end."""
    settings = {"dtype": "float32", "replicas": replicas, "engine": {"process": mode}}
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        with started(Path(folder), settings) as server:
            start_s = time.perf_counter() - began
            return {"start_s": start_s, **asyncio.run(drive(server.url, requests)), **memory(server)}


def table(found: dict[str, list[dict[str, float]]]) -> str:
    """Markdown: a line for each figure."""
    body = []
    for title, name in FIGURES.items():
        values = [[one[name] for one in found[mode]] for mode in MODES]
        ratio = Spread.of(ratios(values[1], values[0]))
        body.append([title, *(Spread.of(each).bracketed() for each in values), ratio.bracketed(".2f")])
    return report.table(["figure", *MODES, "process ÷ thread"], body)


def main(
    rounds: Rounds = 3,
    replicas: Annotated[int, typer.Option(min=1, help="Of each server.")] = 2,
    requests: Annotated[int, typer.Option(min=1, help="Tiny requests of each server, 16 at once.")] = 400,
    json_file: JsonFile = None,
) -> None:
    """Measure, and print a Markdown table: medians, least and most."""
    found: dict[str, list[dict[str, float]]] = {mode: [] for mode in MODES}
    for number in range(rounds):
        order: Sequence[str] = MODES if number % 2 == 0 else MODES[::-1]
        for mode in order:
            found[mode].append(measure(mode, replicas, requests))
            out.print(
                f"round {number + 1}, {mode}: { {name: round(value, 1) for name, value in found[mode][-1].items()} }"
            )
    made: dict[str, Any] = {
        "rounds": rounds,
        "replicas": replicas,
        "requests": requests,
        "machine": machine_line(),
        "found": found,
    }
    report.deliver(f"{table(found)}\n\n{machine_line()}; {replicas} replicas, {rounds} rounds.", made, json_file)


if __name__ == "__main__":
    typer.run(main)
