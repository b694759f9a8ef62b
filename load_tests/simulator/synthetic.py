"""Traces made up to be hard on routers; deterministic for a seed. `python -m load_tests.simulator.synthetic NAME FILE`.

* ``hot-prefix``: most requests begin with one long prompt (a popular document), the rest are unrelated; the demand for
  the one prefix is several replicas' worth.
* ``cold-burst``: prompts without anything in common arrive at one instant, on top of a light load.
* ``uniform-sessions``: conversations of equal length and pace, none hotter than another.
"""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer

from load_tests.simulator.trace import BLOCK_TOKENS, TraceRequest

OUTPUT_TOKENS = 200


def hot_prefix(seed: int, requests: int = 2000, prefix_blocks: int = 20, share: float = 0.7) -> list[TraceRequest]:
    """Requests at random times, about 10 a second; ``share`` of them ask something new about one prompt."""
    rng, ids = random.Random(seed), itertools.count()
    prefix = _take(ids, prefix_blocks)
    now, trace = 0.0, []
    for _ in range(requests):
        now += rng.expovariate(10.0)
        head = prefix if rng.random() < share else ()
        trace.append(_request(now, (*head, *_take(ids, rng.randint(2, 12)))))
    return trace


def cold_burst(seed: int, burst: int = 200, before: int = 400, at_s: float = 60.0) -> list[TraceRequest]:
    """``before`` requests spread over twice ``at_s`` seconds, and in the middle ``burst`` unrelated ones at once."""
    rng, ids = random.Random(seed), itertools.count()
    times = sorted(rng.uniform(0, 2 * at_s) for _ in range(before))
    trace = [_request(time, _take(ids, rng.randint(2, 40))) for time in times]
    trace += [_request(at_s, _take(ids, rng.randint(2, 40))) for _ in range(burst)]
    return sorted(trace, key=lambda request: request.timestamp_s)


def uniform_sessions(seed: int, sessions: int = 200, turns: int = 10, think_s: float = 60.0) -> list[TraceRequest]:
    """``sessions`` conversations, each adding 3 blocks every ``think_s`` seconds, started at random times."""
    rng, ids = random.Random(seed), itertools.count()
    trace: list[TraceRequest] = []
    for _ in range(sessions):
        start_s, prompt = rng.uniform(0, think_s * turns), _take(ids, 4)
        for turn in range(turns):
            trace.append(_request(start_s + think_s * turn, prompt))
            prompt = (*prompt, *_take(ids, 3))
    return sorted(trace, key=lambda request: request.timestamp_s)


SYNTHETIC: dict[str, Callable[[int], list[TraceRequest]]] = {
    "hot-prefix": hot_prefix,
    "cold-burst": cold_burst,
    "uniform-sessions": uniform_sessions,
}


def _take(ids: Iterator[int], count: int) -> tuple[int, ...]:
    return tuple(itertools.islice(ids, count))


def _request(time_s: float, hash_ids: tuple[int, ...]) -> TraceRequest:
    return TraceRequest(time_s, len(hash_ids) * BLOCK_TOKENS, OUTPUT_TOKENS, hash_ids)


def write(
    name: Annotated[str, typer.Argument(help=f"One of {', '.join(SYNTHETIC)}.")],
    file: Annotated[Path, typer.Argument(help="Where to write the trace, in Mooncake's format.")],
    seed: Annotated[int, typer.Option(help="For the random numbers.")] = 0,
) -> None:
    """Write a synthetic trace."""
    if name not in SYNTHETIC:
        raise typer.BadParameter(f"unknown trace {name!r}; choose one of {', '.join(SYNTHETIC)}")
    with file.open("w", encoding="utf-8") as out:
        for request in SYNTHETIC[name](seed):
            line = {
                "timestamp": request.timestamp_s * 1000,
                "input_length": request.input_tokens,
                "output_length": request.output_tokens,
                "hash_ids": request.hash_ids,
            }
            out.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    typer.run(write)
