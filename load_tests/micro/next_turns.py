"""What share of next turns finds its KV on the device, by `kv.device_policy`: `python -m load_tests.micro.next_turns`.

Conversations with think times between their turns, more of them than the device pools hold, so that something has to
leave the devices before its next turn comes. The arms alternate, each on a server of its own that is started as
`make serve` does, with the same conversations and think times. A next turn has *found* its KV when all full blocks of
the turn before came from the device (`usage.kv_cache`).
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any

import httpx
import typer
from rich.progress import Progress

from load_tests.faults.streams import REQUEST_S, Stream, run_stream
from load_tests.harness.conversations import text, tokenize
from load_tests.harness.running_server import ServerError, started
from load_tests.measuring import report
from load_tests.measuring.command import JsonFile, one_sentence, progress_bar
from load_tests.measuring.comparison import Comparison
from load_tests.measuring.spread import percentile, ratios
from load_tests.measuring.turns import rotated

MODEL = "demo"
BLOCK_TOKENS = 32
ARMS = ("lru", "hotness")
SHARES = ("found_share", "device_token_share", "cpu_token_share")


@dataclass(frozen=True)
class Scenario:
    """How many conversations, how long, and what they share the devices with."""

    conversations: int = 24
    turns: int = 6
    prompt_tokens: tuple[int, int] = (400, 900)
    question_tokens: tuple[int, int] = (20, 60)
    answer_tokens: int = 32
    think_median_s: float = 8.0
    think_sigma: float = 0.5
    """Of the logarithm of think times, which are log-normal."""
    replicas: int = 2
    device_blocks: int = 256
    """Of `BLOCK_TOKENS` tokens, per replica."""

    def settings(self, device_policy: str) -> dict[str, Any]:
        """What the server is started with."""
        engine = {"device_blocks": self.device_blocks, "block_size_tokens": BLOCK_TOKENS}
        kv = {"redis_url": None, "device_policy": device_policy}
        return {"replicas": self.replicas, "max_model_len": 2048, "engine": engine, "kv": kv}


@dataclass
class NextTurn:
    """One turn after a conversation's first. `known_tokens`: what the turn before has left, in full blocks."""

    known_tokens: int
    device_tokens: int
    cpu_tokens: int
    first_token_s: float

    @property
    def found(self) -> bool:
        """Whether all that was left was on the device."""
        return self.device_tokens >= self.known_tokens


async def replay(url: str, scenario: Scenario, seed: int, progress: Progress) -> list[NextTurn]:
    """All next turns of all conversations. Raises ServerError for one that was not answered."""
    bar = progress.add_task("turns", total=scenario.conversations * scenario.turns)
    async with httpx.AsyncClient(base_url=url, timeout=REQUEST_S) as client:
        words = await tokenize(client, MODEL, text(Random(seed), 40_000))

        async def one(number: int) -> list[NextTurn]:
            return await _converse(client, scenario, Random(f"{seed}/{number}"), words, lambda: progress.advance(bar))

        turns = await asyncio.gather(*map(one, range(scenario.conversations)))
    progress.remove_task(bar)
    return [turn for conversation in turns for turn in conversation]


async def _converse(
    client: httpx.AsyncClient, scenario: Scenario, rng: Random, words: list[int], on_turn: Any
) -> list[NextTurn]:
    start = rng.randrange(len(words) - scenario.prompt_tokens[1])
    prompt = words[start : start + rng.randint(*scenario.prompt_tokens)]
    next_turns: list[NextTurn] = []
    known = 0
    await asyncio.sleep(rng.random() * scenario.think_median_s)
    for turn in range(scenario.turns):
        stream = Stream(prompt)
        await run_stream(client, MODEL, stream, scenario.answer_tokens)
        if not stream.ended:
            raise ServerError(f"a turn was not answered: {stream.error or stream.status}")
        on_turn()
        if turn:
            used = stream.kv_cache
            next_turns.append(NextTurn(known, used.get("device", 0), used.get("cpu", 0), stream.first_token_s))
        # The KV of the last sampled token is not computed.
        known = (len(prompt) + len(stream.tokens) - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        question = rng.randrange(len(words) - scenario.question_tokens[1])
        prompt = prompt + stream.tokens + words[question : question + rng.randint(*scenario.question_tokens)]
        await asyncio.sleep(scenario.think_median_s * rng.lognormvariate(0.0, scenario.think_sigma))
    return next_turns


def run_arm(arm: str, scenario: Scenario, seed: int, progress: Progress) -> dict[str, Any]:
    """Start a server, replay on it, and return the figures. Raises ServerError."""
    with tempfile.TemporaryDirectory() as folder, started(Path(folder), scenario.settings(arm)) as server:
        turns = asyncio.run(replay(server.url, scenario, seed, progress))
    waits = [turn.first_token_s for turn in turns]
    known = sum(turn.known_tokens for turn in turns)
    return {
        "arm": arm,
        "seed": seed,
        "next_turns": len(turns),
        "found_share": sum(turn.found for turn in turns) / len(turns),
        "device_token_share": sum(min(turn.device_tokens, turn.known_tokens) for turn in turns) / known,
        "cpu_token_share": sum(min(turn.cpu_tokens, turn.known_tokens) for turn in turns) / known,
        "ttft_p50_s": statistics.median(waits),
        "ttft_p90_s": percentile(waits, 90),
    }


def compared(rows: list[dict[str, Any]], figure: str) -> Comparison:
    """One figure of the arms, round by round."""
    return Comparison(figure, "", "lru", {arm: [row[figure] for row in rows if row["arm"] == arm] for arm in ARMS})


def table(rows: list[dict[str, Any]]) -> str:
    """Each arm's figures over the rounds, and the ratio of each round's pair."""
    body = [
        [arm]
        + [compared(rows, name).spread(arm).bracketed(".2f") for name in SHARES]
        + [f"{compared(rows, name).spread(arm).bracketed('.0f', 1e3)} ms" for name in ("ttft_p50_s", "ttft_p90_s")]
        for arm in ARMS
    ]
    head = ["arm", "next turns found on the device", "tokens from the device", "from the CPU tier", "TTFT p50", "p90"]
    ratio = compared(rows, "ttft_p50_s").ratio("hotness").bracketed(".2f")
    return f"{report.table(head, body)}\n\nTTFT p50 of next turns, hotness / lru: {ratio}"


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Pairs of servers; each pair has conversations of its own.")] = 3,
    conversations: Annotated[int, typer.Option(min=1)] = Scenario.conversations,
    turns: Annotated[int, typer.Option(min=2)] = Scenario.turns,
    think_s: Annotated[float, typer.Option(min=0.0, help="Median think time.")] = Scenario.think_median_s,
    replicas: Annotated[int, typer.Option(min=1)] = Scenario.replicas,
    device_blocks: Annotated[
        int, typer.Option(min=64, help=f"Blocks of {BLOCK_TOKENS} tokens per replica.")
    ] = Scenario.device_blocks,
    json_file: JsonFile = None,
) -> None:
    """Start servers with each device policy in turns, and print what next turns found."""
    scenario = Scenario(
        conversations=conversations,
        turns=turns,
        think_median_s=think_s,
        replicas=replicas,
        device_blocks=device_blocks,
    )
    rows: list[dict[str, Any]] = []
    with one_sentence(ServerError), progress_bar() as progress:
        bar = progress.add_task("servers", total=rounds * len(ARMS))
        for seed in range(rounds):
            for arm in rotated(ARMS, seed):
                rows.append(run_arm(arm, scenario, seed, progress))
                progress.advance(bar)
    waits = compared(rows, "ttft_p50_s").values
    found = {"scenario": asdict(scenario), "runs": rows, "ttft_ratios": ratios(waits["hotness"], waits["lru"])}
    report.deliver(table(rows), found, json_file)


if __name__ == "__main__":
    typer.run(main)
