"""Prompts that part, on a model with windows or states: no prefix cache, vLLM's own one, and crosskv's store.

    python -m load_tests.micro.parted_prompts --kinds windows --pools small
    python -m load_tests.micro.parted_prompts --write-docs

Every arm is an engine in a process of its own, of the same settings. They take turns at the same prompts, each with
nothing cached. crosskv has the plans of a manager, by measured rates, and a tier, both in memory: neither HTTP nor Ray
is in what is measured. What is measured is kept, and the same command goes on.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Annotated, Any

import typer

from configs.model_folder import PROJECT_ROOT
from configs.settings import Settings, load_settings
from deployments.protocol.wire import KV_CACHE_USAGE
from load_tests.harness.engine import Engine, greedy
from load_tests.harness.engine_process import EngineError, EngineProcess
from load_tests.harness.models import write_hybrid
from load_tests.harness.planned_engine import RatedEngine
from load_tests.measuring.comparison import Bound, Comparison
from load_tests.measuring.interval import FEWEST
from load_tests.measuring.journal import Journal
from load_tests.measuring.program import Block, JsonFile, chosen, conclude, one_sentence, progress_bar
from load_tests.measuring.report import table

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput

NONE, OWN, OURS = "no cache", "vLLM's own", "crosskv"
ARMS = (NONE, OWN, OURS)
AT_LEAST = Bound(3.0, at_most=False)
QUESTIONS, TASKS, MIDDLES, CHATS = "questions", "tasks", "middles", "chats"
"""About a document, in few words or many; about one that from some place on is another text; of a conversation, which
goes on."""
CASES = ((QUESTIONS, 4), (QUESTIONS, 48), (TASKS, 4), (MIDDLES, 4), (CHATS, 4))
"""Loads, and the tokens of their answers."""
RETURNS, AT_ONCE = 3, 2
"""How often a document or chat comes back, as in the bench, and requests under way."""
DOCUMENT, QUESTION, TASK, HISTORY, SAID = (600, 1400), (10, 120), (140, 340), (400, 1000), (20, 100)
"""Tokens, drawn evenly."""
LAST_MESSAGE = {QUESTIONS: QUESTION, TASKS: TASK, MIDDLES: QUESTION, CHATS: SAID}
LONGEST = 1792
BLOCK_TOKENS = {"windows": 32, "states": 256}
POOLS = ("small", "large")
"""The device does not hold what comes back; or it does."""
SIZES = {
    ("windows", "small"): (57, 5), ("windows", "large"): (228, 5),
    ("states", "small"): (8, 12), ("states", "large"): (8, 5),
}  # fmt: skip
"""Device blocks of all layers, as settings count them, and documents or chats. 8 blocks of states are eight times as
many of one layer of attention in eight."""
RESULTS = PROJECT_ROOT / "load_tests" / "results" / "parted_prompts.jsonl"
PAGE = PROJECT_ROOT / "docs" / "measured" / "models.md"
PLACE = Block(PAGE, "<!-- results: written by python -m load_tests.micro.parted_prompts -->", "<!-- end of results -->")
HEAD = (
    "model", "device", "prompts", "answer", "rounds", "tokens/s ÷ vLLM's own", "÷ no cache", "at most",
    "reused: vLLM's own", "crosskv",
)  # fmt: skip
"""`at most`: prompts' tokens for each that does not return. `reused`: of those that return."""


@dataclass(frozen=True)
class Spec:
    """An arm's engine, for `EngineProcess`."""

    kind: str
    pool: str
    arm: str

    def settings(self, folder: str) -> Settings:
        """Return a server's settings, but for what the arm is about."""
        block = BLOCK_TOKENS[self.kind]
        kv: dict[str, Any] = {"segment_tokens": max(256, block), "enabled": self.arm != NONE}
        if self.arm == OWN:
            kv["processor"] = "another kind"  # a replica whose KV is not shared keeps vLLM's own prefix cache
        engine = {"block_size_tokens": block, "device_blocks": SIZES[self.kind, self.pool][0]}
        model = {"model": folder, "dtype": "bfloat16", "max_model_len": LONGEST}
        return load_settings({**model, "engine": {**engine, "max_num_seqs": AT_ONCE}, "kv": kv})

    def open(self, folder: str) -> _Host:
        """See `EngineSpec`."""
        return _Host(self, folder)


@dataclass(frozen=True)
class Cell:
    """One arm's turn at one load: a `Point`."""

    kind: str
    pool: str
    load: str
    answer: int
    round: int
    arm: str

    @property
    def key(self) -> dict[str, Any]:
        """All of it."""
        return asdict(self)


@dataclass
class _Session:
    """Prompts that begin alike: each has `kept` tokens of the text, and a tail of its own."""

    text: list[int]
    kept: list[int]
    tails: list[list[int]]


class _Host:
    """The engine of an arm."""

    def __init__(self, spec: Spec, folder: str) -> None:
        settings, self._count = spec.settings(folder), SIZES[spec.kind, spec.pool][1]
        self._engine = RatedEngine(settings) if spec.arm == OURS else Engine(settings)
        self._runner = asyncio.Runner()
        self.close = self._engine.close
        self.measure(CHATS, "warm-up", 4)

    def measure(self, load: str, seed: str, answer: int) -> dict[str, Any]:
        """Empty the cache and serve a load: tokens a second, tokens by where their KV came from, and reasons."""
        if isinstance(self._engine, RatedEngine):
            self._runner.run(self._engine.forget())
        else:
            core: Any = self._engine.thread.core
            self._engine.thread.call(core.reset_prefix_cache).result()
        gc.collect()
        return self._runner.run(self._serve(load, seed, answer))

    def _stream(self, prompt: Sequence[int], answer: int, last_message: int) -> AsyncIterator[RequestOutput]:
        """The outputs for a prompt, whose last message begins there."""
        if isinstance(self._engine, RatedEngine):
            return self._engine.stream(prompt, greedy(answer), last_message)
        return self._engine.stream(prompt, greedy(answer))

    async def _serve(self, load: str, seed: str, answer: int) -> dict[str, Any]:
        sessions, draw = _sessions(load, Random(seed), self._count), Random(seed)
        places = asyncio.Semaphore(AT_ONCE)
        tokens, reasons = Counter[str](prompt=0, returning=0, reused=0, loaded=0), Counter[str]()

        async def one(session: _Session, turn: int) -> None:
            text = session.text[: session.kept[turn]]
            prompt = [*text, *session.tails[turn]]
            async with places:
                output = [each async for each in self._stream(prompt, answer, len(session.text))][-1]
            usage = (output.kv_transfer_params or {}).get(KV_CACHE_USAGE, {})
            reused = usage["device"] + usage["cpu"] if usage else output.num_cached_tokens or 0
            returning = len(text) if turn else 0
            tokens.update(prompt=len(prompt), returning=returning, reused=reused, loaded=usage.get("cpu", 0))
            if usage and reused < returning - self._engine.block_tokens:
                reasons[f"{usage['reason']}, turn {turn}"] += 1
            if load == CHATS:  # what was said goes on
                session.text = [*prompt, *output.outputs[0].token_ids]

        began = time.perf_counter()
        for turn in range(1 + RETURNS):
            order = draw.sample(sessions, len(sessions))
            await asyncio.gather(*(one(session, turn) for session in order))
        answered = answer * (1 + RETURNS) * len(sessions)
        return {"tokens_per_s": answered / (time.perf_counter() - began), **tokens, "reasons": reasons}


def _sessions(load: str, draw: Random, count: int) -> list[_Session]:
    def tokens(length: int) -> list[int]:
        return [draw.randrange(10, 500) for _ in range(length)]

    found = []
    for _ in range(count):
        text = tokens(draw.randint(*(HISTORY if load == CHATS else DOCUMENT)))
        kept = [LONGEST] * (1 + RETURNS)
        if load == MIDDLES:
            kept[1:] = [draw.randint(len(text) // 4, len(text)) for _ in range(RETURNS)]
        tails = [[*tokens(max(0, len(text) - part)), *tokens(draw.randint(*LAST_MESSAGE[load]))] for part in kept]
        found.append(_Session(text, kept, tails))
    return found


def _measure(kind: str, pool: str, cells: Sequence[Cell], journal: Journal[Cell]) -> None:
    """Measure these cells of one model and pool."""
    with tempfile.TemporaryDirectory(prefix="crosskv-") as scratch, contextlib.ExitStack() as stack:
        folder = Path(scratch) / "model"
        write_hybrid(kind, folder)
        processes: dict[str, EngineProcess] = {}
        progress = stack.enter_context(progress_bar())
        bar = progress.add_task(f"{kind}, {pool}", total=len(cells))
        for cell in cells:
            if cell.arm not in processes:
                log = Path(scratch) / f"{cell.arm}.log"
                processes[cell.arm] = EngineProcess(Spec(kind, pool, cell.arm), str(folder), log)
                stack.callback(processes[cell.arm].close)
            seed = f"{cell.round}/{cell.load}"
            journal.add(cell, **processes[cell.arm].call("measure", load=cell.load, seed=seed, answer=cell.answer))
            progress.advance(bar)


def main(
    kinds: Annotated[str, typer.Option(help=f"With commas between them: {', '.join(BLOCK_TOKENS)}.")] = ",".join(
        BLOCK_TOKENS
    ),
    pools: Annotated[str, typer.Option(help=f"Of the device: {', '.join(POOLS)}.")] = ",".join(POOLS),
    rounds: Annotated[int, typer.Option(min=1, help="Of each load and arm.")] = FEWEST,
    results: Annotated[Path, typer.Option(help="The file of what is measured.")] = RESULTS,
    docs: Annotated[bool, typer.Option("--write-docs", help="Put the table into models.md.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Exit code 1 where crosskv has less than three times the tokens a second of vLLM's own cache."""
    with one_sentence(EngineError):
        asked = list(product(chosen("model", kinds.split(","), BLOCK_TOKENS), chosen("pool", pools.split(","), POOLS)))
        journal: Journal[Cell] = Journal(results)
        for kind, pool in asked:
            if missing := journal.missing(_cells(kind, pool, rounds)):
                _measure(kind, pool, missing, journal)
    found = [_compared(*each, *case, journal) for each, case in product(asked, CASES)]
    misses = [sentence for one, _ in found for sentence in one.misses()]
    text = table(HEAD, [line for _, line in found])
    conclude(text, [one.as_dict() for one, _ in found], json_file, misses, PLACE if docs else None)


def _cells(kind: str, pool: str, rounds: int) -> list[Cell]:
    """Return all cells of a model and pool: two caches take turns in an order that is drawn; at last, once, none."""
    found: list[Cell] = []
    for number, (load, answer) in product(range(rounds), CASES):
        arms = Random(f"{number}/{load}/{answer}").sample((OWN, OURS), 2)
        found += [Cell(kind, pool, load, answer, number, arm) for arm in arms]
    return [*found, *(Cell(kind, pool, *case, 0, NONE) for case in CASES)]


def _compared(kind: str, pool: str, load: str, answer: int, journal: Journal[Cell]) -> tuple[Comparison, list[str]]:
    """Return a load's arms side by side, and its line of the table, from all rounds that the journal has."""
    rounds: list[int] = []
    while all(journal.has(Cell(kind, pool, load, answer, len(rounds), arm)) for arm in (OWN, OURS)):
        rounds.append(len(rounds))
    of = {arm: journal.of(Cell(kind, pool, load, answer, each, arm) for each in rounds) for arm in ARMS}
    speeds = {arm: [one["tokens_per_s"] for one in found] for arm, found in of.items()}
    title = f"{kind}, {pool} device, {load}, answers of {answer}"
    compared = Comparison(title, "tokens/s", OWN, {arm: speeds[arm] for arm in (OWN, OURS)}, (OURS,), AT_LEAST)
    to_none = f"{speeds[OURS][0] / speeds[NONE][0]:.2f}" if speeds[NONE] else ""
    ratio = [compared.ratio(OURS).slashed(".2f", bold=True), to_none]
    prompt, returning = (sum(one[part] for one in of[OURS]) for part in ("prompt", "returning"))
    shares = [_share(of[arm]) for arm in (OWN, OURS)]
    most = f"{prompt / (prompt - returning):.2f}"
    return compared, [kind, pool, load, f"{answer}", f"{len(rounds)}", *ratio, most, *shares]


def _share(found: Sequence[Mapping[str, Any]]) -> str:
    return f"{sum(one['reused'] for one in found) / sum(one['returning'] for one in found):.0%}"


if __name__ == "__main__":
    typer.run(main)
