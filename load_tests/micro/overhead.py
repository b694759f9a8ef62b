"""What KV reuse costs where it does not help, and how near a tier's hit comes: `python -m load_tests.micro.overhead`

1. *Decoding while answers are saved*: time per output token of several streams, saving on and off. There is no switch
   for saving, so "off" is the same engine with a port that grants no save.
2. *Nothing to reuse*: distinct prompts with short answers, against plain vLLM (`kv.enabled: false`, a process of its
   own) in tokens per second. The tiers are full of such prompts from the rounds before.
3. *A CPU-tier hit against a device hit*: time to the first token of the same prompt, with layerwise loading as the
   scheduler chooses (`auto`) and without it.

In each round all arms of a question come one after the other, in rotating order; ratios are of one round's arms. One
arm comes twice: its ratio to itself is what the machine adds. vLLM (with a random-weights model), manager and tiers
are real (`load_tests.harness.tiered_engine`); no HTTP.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from configs.settings import Settings, load_settings
from load_tests.harness.engine import Engine, Timed, prompt, start_with_engine_threads
from load_tests.harness.engine_process import EngineProcess
from load_tests.harness.models import write_random_model
from load_tests.harness.tiered_engine import TieredEngine
from load_tests.harness.tiers import MIB, running
from load_tests.measuring import report
from load_tests.measuring.comparison import COLUMNS, Bound, Comparison
from load_tests.measuring.program import EngineDtype, JsonFile, ModelFolder, Rounds, out, progress_bar
from load_tests.measuring.turns import alternated

STREAMS, DECODE_PROMPT, DECODED = 4, 256, 288
"""The prompt is one segment, and the answer fills another one before it ends."""
BATCH, BATCH_PROMPT, BATCH_ANSWER = 8, 512, 32
HIT_TOKENS = (1000, 2000, 4000)
STEP_TOKENS = 2048
"""Not the setting's default, so that machines with another default can be compared."""
KV: dict[str, Any] = {"cpu_tier_bytes": 128 * MIB, "redis_bytes": 256 * MIB, "load_or_recompute": "load"}
SEEDS = itertools.count(1)
Arm: TypeAlias = Callable[[], Awaitable[float]]


def engine_settings(model: str, dtype: str, kv: dict[str, Any]) -> Settings:
    """The same engine for all arms."""
    engine = {"device_blocks": 512, "max_num_seqs": 16, "max_num_batched_tokens": STEP_TOKENS}
    return load_settings({"model": model, "dtype": dtype, "engine": engine, "kv": kv})


@dataclass(frozen=True)
class PlainSpec:
    """Plain vLLM, for a process of its own that does nothing until it is asked."""

    dtype: str

    @contextlib.contextmanager
    def open(self, folder: str) -> Iterator[PlainHost]:
        """The engine in this process, and its end."""
        engine = Engine(engine_settings(folder, self.dtype, {"enabled": False}))
        try:
            yield PlainHost(engine)
        finally:
            engine.close()


class PlainHost:
    """The host of a `PlainSpec`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._runner = asyncio.Runner()

    def serve(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Timed:
        """Prompts that are sent at once."""
        return self._runner.run(self._engine.serve(prompts, max_tokens))


async def decode_arm(engine: TieredEngine, saves: bool) -> float:
    """Milliseconds per output token of several streams."""
    found = await checked_run(engine, saves, STREAMS, DECODE_PROMPT, DECODED)
    await engine.forget()
    return 1e3 * found.tpot_s


async def batch_arm(engine: TieredEngine, saves: bool) -> float:
    """Tokens per second of prompts that were never seen, and their answers."""
    return _tokens_per_s(await checked_run(engine, saves, BATCH, BATCH_PROMPT, BATCH_ANSWER))


async def plain_arm(plain: EngineProcess) -> float:
    """The same of plain vLLM."""
    prompts = _new_prompts(BATCH, BATCH_PROMPT)
    return _tokens_per_s(await asyncio.to_thread(plain.call, "serve", prompts=prompts, max_tokens=BATCH_ANSWER))


async def checked_run(engine: TieredEngine, saves: bool, streams: int, tokens: int, decoded: int) -> Timed:
    """New prompts at once, and until all is saved; raises unless it is saved as wanted."""
    engine.port.grants = saves
    before = engine.segments_saved
    found = await engine.serve(_new_prompts(streams, tokens), decoded)
    await engine.rest()
    saved = engine.segments_saved - before
    engine.port.grants = True
    if bool(saved) != saves:
        raise RuntimeError(f"{saved} segments were saved where saving was {'on' if saves else 'off'}")
    return found


async def hit_arm(engine: TieredEngine, tokens: Sequence[int], layerwise: Any) -> float:
    """Milliseconds to the first token of a prompt in the CPU tier, or, `layerwise` None, on the device."""
    engine.reuse.layerwise.choice.mode = layerwise or "off"
    await engine.empty_device()
    tier = "cpu"
    if layerwise is None:
        tier = "device"
        await engine.serve([tokens], 1)
        await engine.rest()
    found = await engine.serve([tokens], 1)
    if len(tokens) - found.usage[tier] > engine.block_tokens:
        raise RuntimeError(f"{len(tokens)} tokens, not from {tier}: {found.usage}")
    return 1e3 * found.ttft_s


def _new_prompts(count: int, tokens: int) -> list[list[int]]:
    return [prompt(next(SEEDS), tokens) for _ in range(count)]


def _tokens_per_s(found: Timed) -> float:
    return BATCH * (BATCH_PROMPT + BATCH_ANSWER) / found.seconds


async def measure(engine: TieredEngine, plain: EngineProcess, rounds: int) -> list[Comparison]:
    """All questions."""
    found: list[Comparison] = []
    with progress_bar() as progress:

        async def ask(title: str, unit: str, judged: Sequence[str], bound: Bound, arms: Mapping[str, Arm]) -> None:
            bar = progress.add_task(title, total=(rounds + 1) * len(arms))
            values = await alternated(arms, rounds, advance=lambda: progress.advance(bar))
            found.append(Comparison(title, unit, next(iter(arms)), values, tuple(judged), bound))
            medians = {arm: round(found[-1].ratio(arm).median, 3) for arm in values}
            out.print(f"{title}: {medians}")

        await ask("TPOT", "ms", ["saving on"], Bound(1.03), {
            "saving off": partial(decode_arm, engine, False),
            "saving on": partial(decode_arm, engine, True),
            "saving off, again": partial(decode_arm, engine, False),
        })  # fmt: skip
        await ask("throughput without reuse", "tokens/s", ["KV reuse"], Bound(0.97, at_most=False), {
            "plain vLLM": partial(plain_arm, plain),
            "KV reuse": partial(batch_arm, engine, True),
            "KV reuse, no save granted": partial(batch_arm, engine, False),
            "plain vLLM, again": partial(plain_arm, plain),
        })  # fmt: skip
        for tokens in HIT_TOKENS:
            await engine.forget()
            words = prompt(next(SEEDS), tokens)
            await engine.serve([words], 1)
            judged = ["CPU tier, layerwise auto", "CPU tier, layerwise off"]
            await ask(f"TTFT, {tokens} tokens", "ms", judged, Bound(1.2), {
                "device": partial(hit_arm, engine, words, None),
                "CPU tier, layerwise auto": partial(hit_arm, engine, words, "auto"),
                "CPU tier, layerwise off": partial(hit_arm, engine, words, "off"),
                "device, again": partial(hit_arm, engine, words, None),
            })  # fmt: skip
    return found


def table(questions: Sequence[Comparison], rounds: int) -> str:
    """Markdown, and a sentence for each target that was missed."""
    misses = [sentence for question in questions for sentence in question.misses()]
    return "\n".join(
        [
            f"{rounds} rounds; min / median / max; ratios are of one round.",
            "",
            report.table(COLUMNS, [line for question in questions for line in question.lines()]),
            "",
            *(misses or ["All targets are reached."]),
        ]
    )


def main(
    rounds: Rounds = 8,
    redis: Annotated[bool, typer.Option(help="With the Redis tier, to which all that is saved is copied.")] = True,
    model: ModelFolder = None,
    dtype: EngineDtype = "auto",
    json_file: JsonFile = None,
) -> None:
    """Measure, and print a Markdown table and what was missed."""
    with tempfile.TemporaryDirectory() as name, running() as server, contextlib.ExitStack() as engines:
        folder = model or write_random_model(Path(name) / "random-qwen2")
        plain = EngineProcess(PlainSpec(dtype), folder, Path(name) / "plain.log")
        engines.callback(plain.close)
        settings = engine_settings(folder, dtype, KV if redis else {**KV, "redis_url": None})
        engine = TieredEngine("overhead", settings, server if redis else None)
        engines.callback(engine.close)
        questions = asyncio.run(measure(engine, plain, rounds))
    made = {"rounds": rounds, "redis": redis, "questions": [question.as_dict() for question in questions]}
    report.deliver(table(questions, rounds), made, json_file)


if __name__ == "__main__":
    start_with_engine_threads("load_tests.micro.overhead")
    typer.run(main)
