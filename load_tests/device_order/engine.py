"""`python -m load_tests.device_order.engine`: the same question asked of a real engine, in this process.

Conversations of several rounds of random lengths, among prompts that come once, on the embedded model's device of 255
blocks, over a manager's brain and a tier in memory. In each round all orders of the device get the same requests, in
turns. Exit codes: see `load_tests.measuring.program`.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from typing import Any

import typer

from configs.model_folder import DEMO_MODEL
from configs.settings import load_settings
from deployments.protocol.wire import KV_CACHE_USAGE
from load_tests.harness.engine import Engine, greedy, prompt, start_with_engine_threads
from load_tests.harness.memory_port import BrainPort
from load_tests.measuring.interval import mean_interval
from load_tests.measuring.program import JsonFile, Rounds, conclude, progress_bar
from load_tests.measuring.turns import turns

ARMS = ("lru", "hotness")
TALKS, ROUNDS_EACH, SCANS = 24, 5, 20
BLOCKS = 256
FIGURES = {
    "hit_share": "conversations' tokens found on the device",
    "next_turn_share": "next turns found whole",
    "next_turn_token_share": "their tokens found",
    "ttft_s": "TTFT of next turns, s",
}


class Talk:
    """One conversation: its tokens so far."""

    def __init__(self, rng: random.Random, system: list[int]) -> None:
        self.tokens = [*system, *prompt(rng.randrange(1 << 30), rng.randint(64, 400))]
        self.left = 0
        """Its tokens when its last turn ended; 0: there was none."""


async def run(engine: Engine, seed: int) -> dict[str, float]:
    """Serve one round's requests, one after the other; shares of what the device had."""
    rng = random.Random(seed)
    system = prompt(seed, 96)
    talks = [Talk(rng, system) for _ in range(TALKS)]
    order: list[Talk | None] = [*(talk for talk in talks for _ in range(ROUNDS_EACH)), *[None] * SCANS]
    rng.shuffle(order)
    found = asked = next_turns = whole = known = total = 0
    waits: list[float] = []
    for talk in order:
        if talk is None:
            await _serve(engine, prompt(rng.randrange(1 << 30), rng.randint(600, 1500)), 1)
            continue
        answer = rng.randint(8, 48)
        output, device, ttft_s = await _serve(engine, talk.tokens, answer)
        asked += len(talk.tokens)
        found += device
        if talk.left:
            # The KV of the last token is computed by the next turn.
            here = (talk.left - 1) // engine.block_tokens * engine.block_tokens
            next_turns, whole = next_turns + 1, whole + (device >= here)
            known, total = known + min(device, here), total + here
            waits.append(ttft_s)
        talk.tokens = [*talk.tokens, *output]
        talk.left = len(talk.tokens)
        talk.tokens += prompt(rng.randrange(1 << 30), rng.randint(16, 96))
    return {
        "hit_share": found / asked,
        "next_turn_share": whole / next_turns,
        "next_turn_token_share": known / total,
        "ttft_s": statistics.fmean(waits),
    }


async def _serve(engine: Engine, tokens: list[int], max_tokens: int) -> tuple[list[int], int, float]:
    """The answer, the tokens that the device had, and the seconds to the first token; returns when all is saved."""
    from vllm.sampling_params import RequestOutputKind

    answer: list[int] = []
    usage: dict[str, Any] = {}
    ttft_s = 0.0
    began = time.perf_counter()
    async for output in engine.stream(tokens, greedy(max_tokens, output_kind=RequestOutputKind.DELTA)):
        ttft_s = ttft_s or time.perf_counter() - began
        answer += output.outputs[0].token_ids
        usage = (output.kv_transfer_params or {}).get(KV_CACHE_USAGE, usage)
    await asyncio.to_thread(engine.wait_for_saves)
    return answer, usage["device"], ttft_s


async def measure(rounds: int, first_seed: int) -> dict[str, list[dict[str, float]]]:
    """Each arm's figures by round."""
    settings = load_settings(
        {"model": DEMO_MODEL, "engine": {"device_blocks": BLOCKS, "max_num_seqs": 4}, "kv": {"segment_tokens": 128}}
    )
    engine = Engine(settings, BrainPort(settings.blocks_per_segment))
    figures: dict[str, list[dict[str, float]]] = {arm: [] for arm in ARMS}
    try:
        with progress_bar() as bar:
            task = bar.add_task("rounds", total=rounds * len(ARMS))
            for turn in turns(ARMS, rounds):
                await engine.empty_device()
                engine.port = BrainPort(settings.blocks_per_segment)
                await asyncio.wrap_future(engine.reuse.order_device(turn.arm == "hotness"))
                figures[turn.arm].append(await run(engine, first_seed + turn.round))
                bar.advance(task)
    finally:
        engine.close()
    return figures


def table(figures: dict[str, list[dict[str, float]]]) -> str:
    """A row for each figure: its means, and the difference of `hotness` to `lru` by round."""
    lines = ["| on a real engine | lru | hotness | hotness - lru |", "|---|---|---|---|"]
    for name, what in FIGURES.items():
        lru, hotness = ([one[name] for one in figures[arm]] for arm in ARMS)
        low, high = mean_interval([b - a for a, b in zip(lru, hotness, strict=True)])
        lines.append(
            f"| {what} | {statistics.fmean(lru):.3f} | {statistics.fmean(hotness):.3f} | {low:+.3f} to {high:+.3f} |"
        )
    return "\n".join(lines)


def main(rounds: Rounds = 8, first_seed: int = 0, json_file: JsonFile = None) -> None:
    """Measure, and print what the device had by each order."""
    start_with_engine_threads("load_tests.device_order.engine")
    figures = asyncio.run(measure(rounds, first_seed))
    conclude(table(figures), figures, json_file)


if __name__ == "__main__":
    typer.run(main)
