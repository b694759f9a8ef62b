"""Prompts that part, on a model with windows or states: one engine with a manager, and with vLLM's own prefix cache.

    python -m load_tests.micro.parted_prompts window
    python -m load_tests.micro.parted_prompts states

The models have random weights and some 40M parameters. Both arms are one engine, whose device is emptied between them:
with plans of a manager and a tier in memory, and with neither. So neither HTTP nor Ray is in what is measured.
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from configs.settings import load_settings
from load_tests.harness.engine import Engine, greedy, prompt, timed
from load_tests.harness.memory_port import BrainPort, MemoryPort
from load_tests.harness.models import VOCABULARY, train_tokenizer
from load_tests.measuring.comparison import COLUMNS, Bound, Comparison
from load_tests.measuring.interval import FEWEST
from load_tests.measuring.program import JsonFile, conclude, progress_bar
from load_tests.measuring.report import table
from load_tests.measuring.turns import turns

PLAIN, OURS = "vLLM's prefix cache", "crosskv"
AT_LEAST = Bound(3.0, at_most=False)
ANSWER = 16
DOCUMENTS, DOCUMENT, QUESTIONS, QUESTION = 3, 1024, 4, 320
"""A question is longer than a block of states: else vLLM keeps a state where the document ends by luck."""
CHATS, OPENING, ROUNDS, SAID = 4, 600, 3, 150


class Kind(StrEnum):
    """What the model's layers keep, but for those of full attention."""

    WINDOW = "window"
    STATES = "states"


@dataclass(frozen=True)
class Model:
    """A model, and an engine's settings for it. The device holds two thirds of what a workload's prompts have."""

    make: Callable[[], Any]
    block: int
    """Tokens."""
    device_blocks: int
    segment_blocks: int
    extensions: tuple[str, ...] = ()


SHAPE: Mapping[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 512, "intermediate_size": 1536, "num_attention_heads": 8,
    "num_key_value_heads": 2, "head_dim": 64, "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip


def _with_windows() -> Any:
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig

    layers = (["sliding_attention"] * 5 + ["full_attention"]) * 2
    return Gemma3ForCausalLM(
        Gemma3TextConfig(
            **SHAPE, num_hidden_layers=12, layer_types=layers, sliding_window=256, query_pre_attn_scalar=64
        )
    )


def _with_states() -> Any:
    from transformers import NemotronHConfig, NemotronHForCausalLM

    return NemotronHForCausalLM(
        NemotronHConfig(
            **SHAPE, layers_block_type=["mamba", "mlp", "mamba", "mlp", "mamba", "mlp", "attention", "mlp"] * 2,
            mamba_num_heads=12, mamba_head_dim=64, n_groups=1, ssm_state_size=32, conv_kernel=4, chunk_size=128,
        )
    )  # fmt: skip


MODELS: Mapping[Kind, Model] = {
    Kind.WINDOW: Model(_with_windows, 32, 32, 8),
    Kind.STATES: Model(_with_states, 256, 4, 1, ("states",)),
}


def main(
    kind: Annotated[Kind, typer.Argument(help="What the model's layers keep.")],
    rounds: Annotated[int, typer.Option(min=1, help="Of each workload and arm.")] = FEWEST,
    json_file: JsonFile = None,
) -> None:
    """Exit code 1 where an arm with a manager has less than three times the tokens per second."""
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(_measure(MODELS[kind], Path(folder), rounds))
    lines = [line for one in found for line in one.lines()]
    misses = [sentence for one in found for sentence in one.misses()]
    conclude("\n\n".join([table(COLUMNS, lines), *misses]), [one.as_dict() for one in found], json_file, misses)


async def _measure(model: Model, folder: Path, rounds: int) -> list[Comparison]:
    engine = _engine(model, folder)
    workloads = {"questions about long documents": _documents, "chats of many rounds": _chats}
    found = []
    try:
        with progress_bar() as progress:
            for title, workload in workloads.items():
                bar = progress.add_task(title, total=2 * rounds)
                values: dict[str, list[float]] = {PLAIN: [], OURS: []}
                for turn in turns((PLAIN, OURS), rounds):
                    engine.port = _port(model) if turn.arm == OURS else _nothing()
                    await engine.empty_device()
                    gc.collect()
                    asker = _Asker(engine, turn.arm == OURS)
                    values[turn.arm].append(await workload(asker, 1000 * (turn.round + 1)))
                    progress.advance(bar)
                found.append(Comparison(title, "tokens/s", PLAIN, values, (OURS,), AT_LEAST))
    finally:
        engine.close()
    return found


def _engine(model: Model, folder: Path) -> Engine:
    import torch

    torch.manual_seed(0)
    model.make().to(torch.bfloat16).save_pretrained(folder)
    train_tokenizer(VOCABULARY).save_pretrained(folder, save_jinja_files=False)
    engine = {
        "block_size_tokens": model.block, "device_blocks": model.device_blocks, "max_num_batched_tokens": 512,
        "log_stats": False,
    }  # fmt: skip
    kv = {"segment_tokens": model.block * model.segment_blocks, "layerwise": {"enabled": "off"}}
    return Engine(load_settings({"model": str(folder), "dtype": "bfloat16", "engine": engine, "kv": kv}), _nothing())


def _nothing() -> MemoryPort:
    port = MemoryPort()
    port.refuse_offers = True
    return port


def _port(model: Model) -> BrainPort:
    from kvmanager.extensions import plan_extensions

    port = BrainPort(model.segment_blocks, plan_extensions(model.extensions), model.block)
    port.extras = dict.fromkeys(model.extensions, True)
    return port


@dataclass
class _Asker:
    """Sends prompts, one after the other, and adds up how long they took."""

    engine: Engine
    planned: bool
    seconds: float = 0.0
    answered: int = 0

    async def ask(self, prompts: Sequence[Sequence[int]]) -> None:
        for tokens in prompts:
            self.seconds += (await timed([self._stream(tokens)], ANSWER)).seconds
            self.answered += ANSWER

    def _stream(self, tokens: Sequence[int]) -> Any:
        params = greedy(ANSWER)
        if not self.planned:
            return self.engine.generate(tokens, params)
        self.engine.port.prompt_tokens = len(tokens)
        return self.engine.stream(tokens, params)

    @property
    def tokens_per_s(self) -> float:
        return self.answered / self.seconds


async def _documents(asker: _Asker, seed: int) -> float:
    """Each document is asked about again when all others have been."""
    documents = [prompt(seed + number, DOCUMENT) for number in range(DOCUMENTS)]
    for question in range(QUESTIONS):
        await asker.ask([
            [*text, *prompt(seed + 100 * (question + 1) + number, QUESTION)] for number, text in enumerate(documents)
        ])  # fmt: skip
    return asker.tokens_per_s


async def _chats(asker: _Asker, seed: int) -> float:
    """Each chat goes on when all others have. Its answers are made up: both arms get the same prompts."""
    chats = [prompt(seed + number, OPENING) for number in range(CHATS)]
    for turn in range(1, ROUNDS + 1):
        await asker.ask(chats)
        chats = [[*chat, *prompt(seed + 100 * turn + number, ANSWER + SAID)] for number, chat in enumerate(chats)]
    return asker.tokens_per_s


if __name__ == "__main__":
    typer.run(main)
