"""What a blend takes compared with a prefill, over HTTP: `python -m load_tests.micro.blend`

For each check layer one server with one replica: times to the first token of prompts of six documents in an order that
never came, and the gaps between the tokens of a stream next to them. Then a server of a smaller model for the hit rate,
which does not depend on the model. Exit codes: 0 measured, 1 a target was missed, 2 something is missing or wrong.
"""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar

import typer
from rich.progress import Progress

from load_tests.bench.choice import default_dtype
from load_tests.harness.client import ServerError
from load_tests.harness.models import SHAPES, ModelError, model_folder, token_counter
from load_tests.harness.server import RunningServer, started
from load_tests.measuring.processes import machine_line
from load_tests.measuring.program import (
    Block,
    InputError,
    JsonFile,
    Rounds,
    chosen,
    conclude,
    one_sentence,
    progress_bar,
    stop_by_signal,
)
from load_tests.micro.blend.client import Blends
from load_tests.micro.blend.measure import CONTEXTS, PERMUTATIONS, Advance, first_tokens, hit_rate, neighbour_gaps
from load_tests.micro.blend.prompts import CHUNKS, DOCUMENT_TOKENS, SEPARATOR, Prompts
from load_tests.micro.blend.report import PAGE, Results, as_json, markdown, misses
from load_tests.workloads import Words

QUESTIONS = ("ttft", "gaps", "hits")
BEGIN, END = "<!-- results: written by python -m load_tests.micro.blend --write-docs -->", "<!-- end of results -->"
MIB = 1024**2
MAX_MODEL_LEN = 4_864
"""The longest prompt of documents, and 1,000 tokens."""
LONGEST_CONTEXTS = 28_672
QUICK_LENGTHS = (140, 200)
NEIGHBOUR_PROMPT_TOKENS = 200
"""More than a neighbour's prompt has."""
LAYERED = {"ttft", "gaps"}

Number = TypeVar("Number", int, float)


def settings_of(model: str, max_model_len: int, check_layer: int | None) -> dict[str, Any]:
    """One replica, whose device holds two of the longest prompts; everything that is stored is loaded."""
    return {
        "model": str(model_folder(model)),
        "dtype": default_dtype(),
        "replicas": 1,
        "max_model_len": max_model_len,
        "engine": {"device_blocks": 2 * max_model_len // 32},
        "kv": {"cpu_tier_bytes": 1024 * MIB, "load_or_recompute": "load"},
        "blending": {"separators": [SEPARATOR], "fill": "first", "check_layer": check_layer},
    }


@contextmanager
def served(model: str, max_model_len: int, check_layer: int | None = None) -> Iterator[RunningServer]:
    """A server of its own."""
    with (
        tempfile.TemporaryDirectory(prefix="crosskv-blend-") as folder,
        started(Path(folder), settings_of(model, max_model_len, check_layer)) as server,
    ):
        yield server


@dataclass(frozen=True)
class Plan:
    """What is measured, and how often."""

    wanted: tuple[str, ...]
    model: str
    hit_model: str
    check_layers: list[int]
    ratios: list[float]
    rounds: int
    lengths: tuple[int, int]
    """Of documents, in tokens: the shortest and the longest."""
    seed: int

    def of_layers(self, results: Results, progress: Progress) -> None:
        """First tokens and gaps, a server for each check layer."""
        text = Words(token_counter(model_folder(self.model)))
        for layer in self.check_layers:
            bar = progress.add_task(f"check layer {layer}", total=None)
            prompts = Prompts(f"{self.seed}/{layer}", text, lengths=self.lengths)
            with served(self.model, MAX_MODEL_LEN, layer) as server:
                asyncio.run(self._of_layer(results, layer, server, prompts, partial(progress.advance, bar)))

    async def _of_layer(
        self, results: Results, layer: int, server: RunningServer, prompts: Prompts, advance: Advance
    ) -> None:
        async with Blends(server, self.model) as client:
            if "ttft" in self.wanted:
                results.first_tokens[layer] = await first_tokens(client, prompts, self.ratios, self.rounds, advance)
            if "gaps" in self.wanted:
                longest = MAX_MODEL_LEN - NEIGHBOUR_PROMPT_TOKENS
                results.gaps[layer] = await neighbour_gaps(
                    client, prompts, self.ratios[0], self.rounds, longest, advance
                )

    def of_hits(self, results: Results, progress: Progress) -> None:
        """The hit rate, on one server."""
        bar = progress.add_task("hit rate", total=PERMUTATIONS)
        text = Words(token_counter(model_folder(self.hit_model)))
        with served(self.hit_model, LONGEST_CONTEXTS) as server:
            asked = hit_rate(server, self.hit_model, text, f"{self.seed}/hits", partial(progress.advance, bar))
            results.hits = asyncio.run(asked)

    def setting(self) -> list[str]:
        """Lines for the reader of the tables."""
        shortest, longest = self.lengths
        said = [machine_line(), f"In {default_dtype()}, seed {self.seed}, {self.rounds} rounds after one"]
        if LAYERED & set(self.wanted):
            documents = f"{CHUNKS} documents of {shortest} to {longest} tokens, from the CPU tier"
            said.append(f"First tokens and gaps: {self.model}, {documents}")
        if "hits" in self.wanted:
            said.append(f"Hit rate: {self.hit_model}, {CONTEXTS} contexts of about 5,000 tokens behind 1,000")
        return said


def main(
    rounds: Rounds = 6,
    model: Annotated[str, typer.Option(help=f"Of {', '.join(SHAPES)}.")] = "365m",
    hit_model: Annotated[str, typer.Option(help="The same, for the hit rate's prompts of 26,000 tokens.")] = "10m",
    check_layers: Annotated[str, typer.Option(help="With commas between them; a server for each.")] = "2,1",
    ratios: Annotated[str, typer.Option(help="Shares of reused tokens that are recomputed.")] = "0.15",
    only: Annotated[str, typer.Option(help=f"Of {', '.join(QUESTIONS)}.")] = ",".join(QUESTIONS),
    seed: int = 0,
    quick: Annotated[bool, typer.Option("--quick", help="The smallest model, short documents, two rounds.")] = False,
    docs: Annotated[bool, typer.Option("--write-docs", help="Put the tables into docs/measured/blending.md.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Measure, print tables, and say which targets were missed."""
    stop_by_signal()
    with one_sentence(ModelError, ServerError, ValueError):
        for name in (model, hit_model):
            chosen("model", [name], SHAPES)
        wanted = chosen("question", only.split(","), QUESTIONS)
        layers, shares = _numbers(check_layers, int), _numbers(ratios, float)
        plan = Plan(wanted, model, hit_model, layers, shares, rounds, DOCUMENT_TOKENS, seed)
        if quick:
            plan = replace(plan, model="10m", check_layers=layers[:1], rounds=min(2, rounds), lengths=QUICK_LENGTHS)
        results = Results()
        with progress_bar() as progress:
            if LAYERED & set(wanted):
                plan.of_layers(results, progress)
            if "hits" in wanted:
                plan.of_hits(results, progress)
    page, block = markdown(results, plan.setting()), Block(PAGE, BEGIN, END)
    conclude(page, as_json(results, plan.setting()), json_file, misses(results), block if docs else None)


def _numbers(words: str, kind: Callable[[str], Number]) -> list[Number]:
    try:
        found = [kind(word) for word in words.split(",") if word.strip()]
    except ValueError:
        found = []
    if not found:
        raise InputError(f"{words!r} is no list of numbers; write them as 2,1.")
    return found


if __name__ == "__main__":
    typer.run(main)
