"""What KV reuse costs where it does not help, and how near a tier's hit comes: `python -m load_tests.micro.overhead`

1. *Decoding while answers are saved*: time per output token of several streams, saving on and off. There is no switch
   for saving, so "off" is the same engine with a port that grants no save.
2. *Nothing to reuse*: distinct prompts with short answers, against plain vLLM (`kv.enabled: false`, a process of its
   own) in tokens per second. The tiers are full of such prompts from the rounds before.
3. *A CPU-tier hit against a device hit*: time to the first token of the same prompt, with layerwise loading as the
   scheduler chooses (`auto`) and without it.

In each round all arms of a question come one after the other, in rotating order; ratios are of one round's arms. One
arm comes twice: its ratio to itself is what the machine adds. vLLM (with a random-weights model), manager and tiers
are real (`load_tests.micro.overhead_arms`); no HTTP.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from load_tests.harness.engine_threads import start_with_engine_threads
from load_tests.micro.overhead_arms import Arm, Layerwise, PlainVLLM, ReusingEngine, Timed
from load_tests.micro.prefetch_chain import running
from load_tests.micro.throttled_engine import prompt, write_random_model

out = Console(stderr=True, highlight=False)
STREAMS, DECODE_PROMPT, DECODED = 4, 256, 288
"""The prompt is one segment, and the answer fills another one before it ends."""
BATCH, BATCH_PROMPT, BATCH_ANSWER = 8, 512, 32
HIT_TOKENS = (1000, 2000, 4000)
SEEDS = itertools.count(1)


@dataclass(frozen=True)
class Question:
    """Values by arm and round, the arm that the others are divided by, and the bound of the median ratio of `arms`."""

    title: str
    unit: str
    base: str
    arms: tuple[str, ...]
    bound: float
    at_most: bool
    values: Mapping[str, Sequence[float]]

    def ratios(self, arm: str) -> list[float]:
        """By round."""
        return [mine / theirs for mine, theirs in zip(self.values[arm], self.values[self.base], strict=True)]

    def misses(self) -> list[str]:
        """A sentence for each arm beyond the bound."""
        sentences = []
        for arm in self.arms:
            median = statistics.median(self.ratios(arm))
            if median > self.bound if self.at_most else median < self.bound:
                side = "at most" if self.at_most else "at least"
                sentences.append(
                    f"Missed: {self.title}, {arm}: {median:.3f} of {self.base}; the target is {side} {self.bound:g}."
                )
        return sentences


def rotated(arms: Sequence[str], number: int) -> list[str]:
    """The arms in the order of round `number`."""
    shift = number % len(arms)
    return [*arms[shift:], *arms[:shift]]


def spread(values: Sequence[float]) -> list[float]:
    """Least, median, most."""
    return [min(values), statistics.median(values), max(values)]


def table(questions: Sequence[Question], rounds: int) -> str:
    """Markdown, and a sentence for each target that was missed."""
    lines = [
        f"{rounds} rounds; min / median / max; ratios are of one round.",
        "",
        "| question | arm | measured | ratio | target |",
        "|---|---|---|---|---|",
    ]
    for question in questions:
        bound = f"{'≤' if question.at_most else '≥'} {question.bound:g}"
        for arm in question.values:
            measured = " / ".join(f"{value:.4g}" for value in spread(question.values[arm]))
            least, median, most = (f"{ratio:.3f}" for ratio in spread(question.ratios(arm)))
            ratio = f"{least} / **{median}** / {most}" if arm != question.base else "1"
            target = bound if arm in question.arms else ""
            lines.append(f"| {question.title} | {arm} | {measured} {question.unit} | {ratio} | {target} |")
    misses = [sentence for question in questions for sentence in question.misses()]
    return "\n".join([*lines, "", *(misses or ["All targets are reached."])])


async def measured(arms: Mapping[str, Arm], rounds: int, progress: Progress, title: str) -> dict[str, list[float]]:
    """Each arm's values, after a round that does not count."""
    values: dict[str, list[float]] = {name: [] for name in arms}
    bar = progress.add_task(title, total=(rounds + 1) * len(arms))
    for number in range(rounds + 1):
        for name in rotated(list(arms), number):
            value = await arms[name]()
            if number:
                values[name].append(value)
            progress.advance(bar)
    return values


async def decode_arm(engine: ReusingEngine, saves: bool) -> float:
    """Milliseconds per output token of several streams."""
    found = await checked_run(engine, saves, STREAMS, DECODE_PROMPT, DECODED)
    await engine.clear()
    return 1e3 * found.tpot_s


async def batch_arm(engine: ReusingEngine, saves: bool) -> float:
    """Tokens per second of prompts that were never seen, and their answers."""
    return _tokens_per_s(await checked_run(engine, saves, BATCH, BATCH_PROMPT, BATCH_ANSWER))


async def plain_arm(plain: PlainVLLM) -> float:
    """The same of plain vLLM."""
    return _tokens_per_s(await plain.run(_new_prompts(BATCH, BATCH_PROMPT), BATCH_ANSWER))


async def checked_run(engine: ReusingEngine, saves: bool, streams: int, tokens: int, decoded: int) -> Timed:
    """New prompts at once, and until all is saved; raises unless it is saved as wanted."""
    engine.port.grants = saves
    before = engine.segments_saved
    found = await engine.run(_new_prompts(streams, tokens), decoded)
    await engine.rest()
    saved = engine.segments_saved - before
    engine.port.grants = True
    if bool(saved) != saves:
        raise RuntimeError(f"{saved} segments were saved where saving was {'on' if saves else 'off'}")
    return found


async def hit_arm(engine: ReusingEngine, tokens: Sequence[int], layerwise: Layerwise | None) -> float:
    """Milliseconds to the first token of a prompt in the CPU tier, or, None, on the device."""
    engine.reuse.layerwise.choice.mode = layerwise or "off"
    await engine.clear_device()
    tier = "cpu"
    if layerwise is None:
        tier = "device"
        await engine.run([tokens], 1)
        await engine.rest()
    found = await engine.run([tokens], 1)
    if len(tokens) - found.usage[tier] > 32:
        raise RuntimeError(f"{len(tokens)} tokens, not from {tier}: {found.usage}")
    return 1e3 * found.ttft_s


def _new_prompts(count: int, tokens: int) -> list[list[int]]:
    return [prompt(next(SEEDS), tokens) for _ in range(count)]


def _tokens_per_s(found: Timed) -> float:
    return BATCH * (BATCH_PROMPT + BATCH_ANSWER) / found.seconds


async def measure(engine: ReusingEngine, plain: PlainVLLM, rounds: int) -> list[Question]:
    """All questions."""
    questions: list[Question] = []

    def answered(question: Question) -> None:
        questions.append(question)
        medians = {arm: round(statistics.median(question.ratios(arm)), 3) for arm in question.values}
        out.print(f"{question.title}: {medians}")

    with Progress(console=out, transient=True) as progress:
        values = await measured(
            {
                "saving off": partial(decode_arm, engine, False),
                "saving on": partial(decode_arm, engine, True),
                "saving off, again": partial(decode_arm, engine, False),
            },
            rounds, progress, "decoding",
        )  # fmt: skip
        answered(Question("TPOT", "ms", "saving off", ("saving on",), 1.03, True, values))
        values = await measured(
            {
                "plain vLLM": partial(plain_arm, plain),
                "KV reuse": partial(batch_arm, engine, True),
                "KV reuse, no save granted": partial(batch_arm, engine, False),
                "plain vLLM, again": partial(plain_arm, plain),
            },
            rounds, progress, "nothing to reuse",
        )  # fmt: skip
        answered(Question("throughput without reuse", "tokens/s", "plain vLLM", ("KV reuse",), 0.97, False, values))
        for tokens in HIT_TOKENS:
            await engine.clear()
            words = prompt(next(SEEDS), tokens)
            await engine.run([words], 1)
            hits: dict[str, Arm] = {
                "device": partial(hit_arm, engine, words, None),
                "CPU tier, layerwise auto": partial(hit_arm, engine, words, "auto"),
                "CPU tier, layerwise off": partial(hit_arm, engine, words, "off"),
                "device, again": partial(hit_arm, engine, words, None),
            }
            values = await measured(hits, rounds, progress, f"hits of {tokens} tokens")
            arms = ("CPU tier, layerwise auto", "CPU tier, layerwise off")
            answered(Question(f"TTFT, {tokens} tokens", "ms", "device", arms, 1.2, True, values))
    return questions


def report(questions: Sequence[Question], rounds: int, redis: bool) -> dict[str, Any]:
    """For `--json`."""
    return {
        "rounds": rounds,
        "redis": redis,
        "questions": [
            {
                "title": question.title,
                "unit": question.unit,
                "base": question.base,
                "target": {"arms": question.arms, "bound": question.bound, "at_most": question.at_most},
                "values": dict(question.values),
                "ratios": {arm: spread(question.ratios(arm)) for arm in question.values},
                "misses": question.misses(),
            }
            for question in questions
        ],
    }


def main(
    rounds: Annotated[int, typer.Option(min=1, help="How often each arm has its turn.")] = 8,
    redis: Annotated[bool, typer.Option(help="With the Redis tier, to which all that is saved is copied.")] = True,
    model: Annotated[
        str | None, typer.Option(help="A model folder. Default: a random Qwen2 of 45M parameters.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="`float32` where the CPU has no fast bfloat16 (no AVX-512).")] = "auto",
    json_file: Annotated[str | None, typer.Option("--json", help="A file, or - for stdout.")] = None,
) -> None:
    """Measure, and print a Markdown table and what was missed."""
    with tempfile.TemporaryDirectory() as name, running() as server:
        chosen = model or write_random_model(Path(name) / "random-qwen2")
        plain = PlainVLLM(chosen, dtype)
        try:
            engine = ReusingEngine(server, chosen, dtype, redis)
            try:
                questions = asyncio.run(measure(engine, plain, rounds))
            finally:
                engine.close()
        finally:
            plain.close()
    if json_file != "-":
        print(table(questions, rounds))
    text = json.dumps(report(questions, rounds, redis), indent=2)
    if json_file == "-":
        print(text)
    elif json_file:
        Path(json_file).write_text(text)


if __name__ == "__main__":
    start_with_engine_threads("load_tests.micro.overhead")
    typer.run(main)
