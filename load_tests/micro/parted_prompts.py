"""Prompts that part, on a model with windows or states: tokens a second without a cache, with vLLM's own, and with ours.

    python -m load_tests.micro.parted_prompts windows --pool small
    python -m load_tests.micro.parted_prompts states --pool large

The models have random weights and some 40M parameters. An arm is an engine in a process of its own, and the arms take
turns at the same prompts, each with an empty cache. Ours has the plans of a manager and a tier in memory: neither HTTP
nor Ray is in what is measured.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer

from configs.settings import Settings, load_settings
from load_tests.harness.engine import Engine, greedy
from load_tests.harness.engine_process import EngineProcess
from load_tests.harness.models import VOCABULARY, train_tokenizer
from load_tests.measuring.comparison import COLUMNS, Bound, Comparison
from load_tests.measuring.interval import FEWEST
from load_tests.measuring.journal import Journal
from load_tests.measuring.program import JsonFile, conclude, progress_bar
from load_tests.measuring.report import table

NONE, OWN, OURS = "no cache", "vLLM's own", "crosskv"
ARMS = (OWN, OURS, NONE)
AT_LEAST = Bound(3.0, at_most=False)
AT_ONCE = 4
"""Requests under way, as in the bench; so are the returns."""
RETURNS = 3
ANSWERS = (4, 64)
SESSIONS, DOCUMENT, QUESTION = 6, (2000, 4000), (10, 120)
"""Tokens, as all ranges here; lengths are drawn evenly."""
HISTORY, SAID = (1000, 3000), (20, 200)


class Kind(StrEnum):
    """What the model's layers keep, but for those of full attention."""

    WINDOWS = "windows"
    STATES = "states"


class Pool(StrEnum):
    """What the device holds of a workload's prompts."""

    SMALL = "small"
    """Half."""
    LARGE = "large"
    """All."""


class Load(StrEnum):
    """How prompts come back."""

    QUESTIONS = "a document, other questions"
    MIDDLES = "a document, from some place on another one"
    CHATS = "chats of many rounds"


BLOCKS = {Kind.WINDOWS: 32, Kind.STATES: 256}
DEVICE_BLOCKS = {
    (Kind.WINDOWS, Pool.SMALL): 160, (Kind.WINDOWS, Pool.LARGE): 500,
    (Kind.STATES, Pool.SMALL): 21, (Kind.STATES, Pool.LARGE): 40,
}  # fmt: skip
"""Of which vLLM makes several times as many, of a part of the layers each."""


@dataclass(frozen=True)
class Spec:
    """An arm's engine, for `EngineProcess`."""

    kind: Kind
    arm: str
    pool: Pool

    @contextlib.contextmanager
    def open(self, folder: str) -> Iterator[_Host]:
        """See `EngineSpec`."""
        host = _Host(self, folder)
        try:
            yield host
        finally:
            host.engine.close()

    def settings(self, folder: str) -> Settings:
        """Return the arm's settings; a server's, but for what the arm is about."""
        block = BLOCKS[self.kind]
        kv: dict[str, Any] = {"segment_tokens": max(256, block), "enabled": self.arm != NONE}
        if self.arm == OWN:
            kv["processor"] = "another"  # then crosskv leaves the replica to vLLM's own cache
        engine = {
            "block_size_tokens": block, "device_blocks": DEVICE_BLOCKS[self.kind, self.pool], "max_num_seqs": AT_ONCE,
        }  # fmt: skip
        model = {"model": folder, "dtype": "bfloat16", "max_model_len": DOCUMENT[1] + 1000}
        return load_settings({**model, "engine": engine, "kv": kv})


@dataclass(frozen=True)
class Cell:
    """What one number is of."""

    kind: str
    pool: str
    load: str
    answer: int
    round: int
    arm: str

    @property
    def key(self) -> dict[str, Any]:
        """See `Point`."""
        return asdict(self)


@dataclass
class _Session:
    """Prompts that begin alike."""

    text: list[int]
    tails: list[list[int]]
    cuts: list[int | None]
    """Of the text, what each prompt has; None: all."""
    grows: bool = False
    """Whether a prompt and its answer are the next one's text."""


class _Host:
    """Serves one arm."""

    def __init__(self, spec: Spec, folder: str) -> None:
        from load_tests.harness.planned_engine import PlannedEngine, RatedPort, RatedSource

        settings = spec.settings(folder)
        self._runner = asyncio.Runner()
        self._port = RatedPort(settings) if spec.arm == OURS else None
        self.engine = PlannedEngine(settings, self._port) if self._port else Engine(settings)
        if isinstance(self.engine, PlannedEngine):
            self.engine.plan_by(RatedSource(self._port, self.engine.reuse.terms))
        self._core: Any = self.engine.thread.core
        self.measure(Load.CHATS, "warm-up", 4)

    def measure(self, load: Load, seed: str, answer: int) -> dict[str, Any]:
        """Empty the cache and serve a load: seconds, and tokens by where their KV came from, and why."""
        if self._port:
            self._runner.run(self.engine.empty_device())
            self._port.lose_all()
        else:
            self.engine.thread.call(self._core.reset_prefix_cache).result()
        gc.collect()
        return self._runner.run(self._serve(_sessions(load, Random(seed)), Random(seed), answer))

    async def _serve(self, sessions: Sequence[_Session], draw: Random, answer: int) -> dict[str, Any]:
        places = asyncio.Semaphore(AT_ONCE)
        found: Counter[str] = Counter()
        reasons: Counter[str] = Counter()
        began = time.perf_counter()
        for turn in range(1 + RETURNS):

            async def one(session: _Session, turn: int = turn) -> None:
                async with places:
                    prompt = [*session.text[: session.cuts[turn]], *session.tails[turn]]
                    output = await self._ask(prompt, answer, found)
                usage = (output.kv_transfer_params or {}).get("crosskv", {})
                shared = len(session.text[: session.cuts[turn]]) if turn else 0
                found.update(prompt=len(prompt), shared=shared)
                if usage:
                    found.update(device=usage["device"], loaded=usage["cpu"])
                    if usage["device"] + usage["cpu"] < shared - 2 * self.engine.block_tokens:
                        reasons[usage["reason"]] += 1
                else:
                    found.update(device=output.num_cached_tokens or 0)
                if session.grows:
                    session.text = [*prompt, *output.outputs[0].token_ids]

            order = list(sessions)
            draw.shuffle(order)
            await asyncio.gather(*map(one, order))
        seconds = time.perf_counter() - began
        return {"tokens_per_s": answer * len(sessions) * (1 + RETURNS) / seconds, **found, "reasons": dict(reasons)}

    async def _ask(self, prompt: list[int], answer: int, found: Counter[str]) -> Any:
        began, output = time.perf_counter(), None
        async for output in self.engine.stream(prompt, greedy(answer)):
            found.update({} if "first" in found else {})
        return output


def _sessions(load: Load, draw: Random) -> list[_Session]:
    def tokens(span: tuple[int, int] | int) -> list[int]:
        count = span if isinstance(span, int) else draw.randint(*span)
        return [draw.randrange(10, 500) for _ in range(count)]

    found = []
    for _ in range(SESSIONS):
        text = tokens(HISTORY if load is Load.CHATS else DOCUMENT)
        cuts: list[int | None] = [None] * (1 + RETURNS)
        tails = [tokens(SAID if load is Load.CHATS else QUESTION) for _ in cuts]
        if load is Load.MIDDLES:
            cuts[1:] = [draw.randint(len(text) // 4, len(text)) for _ in cuts[1:]]
            tails = [[*tokens(len(text) - (len(text) if cut is None else cut)), *tail] for cut, tail in zip(cuts, tails, strict=True)]
        found.append(_Session(text, tails, cuts, load is Load.CHATS))
    return found


def _write_model(kind: Kind, folder: Path) -> None:
    import torch
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, NemotronHConfig, NemotronHForCausalLM

    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY, "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8,
        "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 8192, "tie_word_embeddings": True,
    }  # fmt: skip
    torch.manual_seed(0)
    model: Any
    if kind is Kind.WINDOWS:
        layers = (["sliding_attention"] * 5 + ["full_attention"]) * 2
        window = {"num_hidden_layers": 12, "layer_types": layers, "sliding_window": 512, "query_pre_attn_scalar": 64}
        model = Gemma3ForCausalLM(Gemma3TextConfig(**shape, **window))
    else:
        layers = ["mamba", "mlp", "mamba", "mlp", "mamba", "mlp", "attention", "mlp"] * 2
        mamba = {"mamba_num_heads": 12, "mamba_head_dim": 64, "n_groups": 1, "ssm_state_size": 32, "conv_kernel": 4}
        model = NemotronHForCausalLM(NemotronHConfig(**shape, **mamba, layers_block_type=layers, chunk_size=128))
    model.to(torch.bfloat16).save_pretrained(folder)
    train_tokenizer(VOCABULARY).save_pretrained(folder, save_jinja_files=False)


def main(
    kind: Annotated[Kind, typer.Argument(help="What the model's layers keep.")],
    pool: Annotated[Pool, typer.Option(help="What the device holds of a load.")] = Pool.SMALL,
    rounds: Annotated[int, typer.Option(min=1, help="Of each load and arm.")] = FEWEST,
    journal: Annotated[Path | None, typer.Option(help="What is measured stays there; a run goes on from it.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Exit code 1 where crosskv has less than three times the tokens a second of vLLM's own cache."""
    loads = [(load, answer) for load in Load for answer in ANSWERS]
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        folder = Path(scratch) / "model"
        _write_model(kind, folder)
        kept: Journal[Cell] = Journal(journal or Path(scratch) / "journal")
        processes: dict[str, EngineProcess] = {}
        for arm in ARMS:
            processes[arm] = EngineProcess(Spec(kind, arm, pool), str(folder), Path(f"/tmp/speed/{arm[:4]}.log"))
            stack.callback(processes[arm].close)
        with progress_bar() as progress:
            bar = progress.add_task("measured", total=rounds * len(loads) * len(ARMS))
            for number in range(rounds):
                for load, answer in loads:
                    order = list(ARMS)
                    Random(f"{number} {load} {answer}").shuffle(order)
                    for arm in order:
                        cell = Cell(kind, pool, load, answer, number, arm)
                        if not kept.has(cell):
                            found = processes[arm].call("measure", load=load, seed=f"{number} {load}", answer=answer)
                            kept.add(cell, **found)
                            print(cell, found, flush=True)
                        progress.advance(bar)


if __name__ == "__main__":
    typer.run(main)
