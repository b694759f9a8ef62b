"""How many tokens does a next turn compute beyond its new ones, with sampled answers put back and without?

    python -m load_tests.conversations.sampled --rounds 3

Two servers in turns, started as `make serve` does, with `http.splice_answers` auto and never. The model answers at
temperature 1 as it likes; its client sends back what it was told. Both servers are asked the same.
"""

from __future__ import annotations

import asyncio
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer
from rich.progress import Progress

from load_tests.harness.client import CHAT, Client, ServerError
from load_tests.harness.conversations import text
from load_tests.harness.models import ModelError, model_folder
from load_tests.harness.server import RunningServer, started
from load_tests.measuring import report
from load_tests.measuring.comparison import Comparison
from load_tests.measuring.program import JsonFile, Rounds, one_sentence, progress_bar
from load_tests.measuring.turns import rotated

BLOCK_TOKENS = 32
ARMS = ("never", "auto")


@dataclass(frozen=True)
class Scenario:
    """The conversations; `model`: demo, or a random one of `load_tests.harness.models`."""

    model: str = "demo"
    conversations: int = 10
    turns: int = 5
    question_tokens: int = 60
    answer_tokens: int = 120
    shortest_answer_tokens: int = 0
    temperature: float = 1.0


@dataclass(frozen=True)
class NextTurn:
    """`extra_tokens`: computed beyond those that neither the prompt before nor its answer had."""

    known_tokens: int
    extra_tokens: int
    seconds: float


async def converse(server: RunningServer, scenario: Scenario, number: int) -> list[NextTurn]:
    """All next turns of one conversation. Raises ServerError for one that was not answered."""
    rng = Random(f"{scenario}/{number}")
    words = text(rng, 4000).split(" ")
    messages: list[dict[str, str]] = []
    turns: list[NextTurn] = []
    known = 0
    async with Client(server.url, scenario.model) as client:
        for turn in range(scenario.turns):
            at = rng.randrange(len(words) - scenario.question_tokens)
            messages.append({"role": "user", "content": " ".join(words[at : at + scenario.question_tokens])})
            body = {
                "model": scenario.model,
                "messages": messages,
                "max_tokens": scenario.answer_tokens,
                "min_tokens": scenario.shortest_answer_tokens,
                "temperature": scenario.temperature,
                "seed": rng.randrange(1 << 30),
                "cache_salt": f"{scenario.model}-{number}",
            }
            began = time.perf_counter()
            answer = await client.post(CHAT, body)
            seconds = time.perf_counter() - began
            usage = answer["usage"]
            if turn:
                extra = usage["kv_cache"]["recomputed"] - (usage["prompt_tokens"] - known)
                turns.append(NextTurn(known, extra, seconds))
            known = usage["prompt_tokens"] + usage["completion_tokens"]
            messages.append({"role": "assistant", "content": answer["choices"][0]["message"]["content"] or ""})
    return turns


def run_arm(arm: str, scenario: Scenario, progress: Progress) -> dict[str, Any]:
    """Start a server, hold the conversations, and return the figures. Raises ServerError and ModelError."""
    settings: dict[str, Any] = {"http": {"splice_answers": arm}, "kv": {"redis_url": None}, "max_model_len": 4096}
    if scenario.model != "demo":
        settings |= {"model": str(model_folder(scenario.model)), "served_model_name": scenario.model}
    with tempfile.TemporaryDirectory() as folder, started(Path(folder), settings) as server:
        bar = progress.add_task("conversations", total=scenario.conversations)
        turns: list[NextTurn] = []
        for number in range(scenario.conversations):
            turns += asyncio.run(converse(server, scenario, number))
            progress.advance(bar)
        progress.remove_task(bar)
        outcomes = {
            labels["outcome"]: int(value)
            for name, labels, value in server.metrics()
            if name == "crosskv_answers_returned_total" and value
        }
    return {
        "arm": arm,
        "next_turns": len(turns),
        "known_tokens": statistics.mean(turn.known_tokens for turn in turns),
        "extra_tokens": statistics.mean(turn.extra_tokens for turn in turns),
        "losing_share": sum(turn.extra_tokens > BLOCK_TOKENS for turn in turns) / len(turns),
        "seconds": statistics.mean(turn.seconds for turn in turns),
        "outcomes": outcomes,
    }


def table(rows: list[dict[str, Any]]) -> str:
    """In Markdown, with the ratio of each round's pair."""
    head = [
        "http.splice_answers",
        "next turns",
        "known tokens",
        "computed beyond the new",
        "more than a block",
        "outcomes",
    ]
    body = [
        [
            row["arm"], str(row["next_turns"]), f"{row['known_tokens']:.0f}", f"{row['extra_tokens']:.0f}",
            f"{100 * row['losing_share']:.0f} %", ", ".join(f"{name} {n}" for name, n in row["outcomes"].items()),
        ]
        for row in rows
    ]  # fmt: skip
    values = {arm: [row["seconds"] for row in rows if row["arm"] == arm] for arm in ARMS}
    ratio = Comparison("seconds", "", "never", values).ratio("auto").bracketed(".2f")
    return f"{report.table(head, body)}\n\nSeconds of a next turn, auto / never: {ratio}"


def main(
    rounds: Rounds = 1,
    model: Annotated[str, typer.Option(help="`demo`, or 10m, 40m, 365m: random weights, a BPE of 8,192.")] = "demo",
    conversations: Annotated[int, typer.Option(min=1)] = Scenario.conversations,
    turns: Annotated[int, typer.Option(min=2)] = Scenario.turns,
    answer_tokens: Annotated[int, typer.Option(min=1)] = Scenario.answer_tokens,
    shortest_answer_tokens: Annotated[int, typer.Option(min=0)] = Scenario.shortest_answer_tokens,
    temperature: Annotated[float, typer.Option(min=0.0, max=2.0)] = Scenario.temperature,
    json_file: JsonFile = None,
) -> None:
    """Start servers that splice and that do not in turns, and print what next turns computed."""
    scenario = Scenario(
        model=model, conversations=conversations, turns=turns, answer_tokens=answer_tokens,
        shortest_answer_tokens=shortest_answer_tokens, temperature=temperature,
    )  # fmt: skip
    rows: list[dict[str, Any]] = []
    with one_sentence(ServerError, ModelError), progress_bar() as progress:
        bar = progress.add_task("servers", total=rounds * len(ARMS))
        for number in range(rounds):
            for arm in rotated(ARMS, number):
                rows.append(run_arm(arm, scenario, progress))
                progress.advance(bar)
    report.deliver(table(rows), {"scenario": asdict(scenario), "runs": rows}, json_file)


if __name__ == "__main__":
    typer.run(main)
