"""Documents that cooled to Redis, dense and sparse, over HTTP: `python -m load_tests.micro.sparse_hit`

For each `kv.sparse` a server of its own, in turns; each is asked about the same documents. A round computes new
documents, waits until Redis has them, lets devices and CPU tiers forget, and asks again. The demo model's answers are
judged; of a model with random weights bytes and times count, and its sparse levels are the uniform ones, for it cannot
be calibrated. Exit codes: 0 measured, 1 a target was missed, 2 something is missing or wrong.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from configs.kv_section import KVSettings
from configs.model_folder import PROJECT_ROOT
from load_tests.bench.choice import default_dtype
from load_tests.harness.client import ServerError
from load_tests.harness.models import SHAPES, ModelError, model_folder, token_counter
from load_tests.harness.server import started
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
from load_tests.measuring.turns import rotated
from load_tests.micro.sparse_hit.client import Cooling
from load_tests.micro.sparse_hit.measure import Level, Tokens, one_round
from load_tests.micro.sparse_hit.report import LAYERS, OFF, as_json, markdown, misses
from load_tests.micro.sparse_hit.talks import Talk, demo_talk, word_talk
from load_tests.workloads import Words

DEMO = "demo"
MODELS = (DEMO, *SHAPES)
LEVELS: tuple[str, ...] = get_args(KVSettings.model_fields["sparse"].annotation)
MIB = 1 << 20
DEMO_TOKENS, WORD_TOKENS = 1024, 3_000
ANSWER_TOKENS = 40
SPARE_TOKENS = 512
"""Besides the documents: a question, an answer, what the template writes."""
PAGE = PROJECT_ROOT / "docs" / "measured" / "sparse.md"
BEGIN = "<!-- {model}: written by python -m load_tests.micro.sparse_hit --model {model} --write-docs -->"
END = "<!-- end of {model} -->"


@dataclass(frozen=True)
class Plan:
    """What is measured, and how often."""

    model: str
    levels: tuple[str, ...]
    turns: int
    """Servers of each level, one after the other."""
    rounds: int
    """Of each server, after one that does not count."""
    questions: int
    tokens: int
    """Of the documents, about."""
    seed: int

    @property
    def folder(self) -> Path:
        """Of the model."""
        return PROJECT_ROOT / "models" / DEMO if self.model == DEMO else model_folder(self.model)

    def settings(self, level: str) -> dict[str, Any]:
        """One replica that loads whatever is stored; its device holds two of the longest prompts."""
        longest = self.tokens + self.tokens // 4 + SPARE_TOKENS
        kv = {"sparse": level, "cpu_tier_bytes": 512 * MIB, "redis_bytes": 512 * MIB, "load_or_recompute": "load"}
        return {
            "model": str(self.folder),
            "dtype": default_dtype(),
            "replicas": 1,
            "max_model_len": longest,
            "engine": {"device_blocks": 2 * longest // 32 + 1},
            "kv": kv,
        }

    def talk(self, number: int, text: Words) -> Talk:
        """The same for every level."""
        if self.model == DEMO:
            return demo_talk(self.seed + number, self.tokens, self.questions)
        return word_talk(f"{self.seed}/{number}", self.tokens, self.questions, text)

    def measured(self, advance: Callable[[], object]) -> dict[str, Level]:
        """Every level. Raises ServerError."""
        found = {level: Level() for level in self.levels}
        text = Words(token_counter(self.folder))
        tokens = _tokens_of(self.folder)
        for turn in range(self.turns):
            talks = [self.talk(turn * (self.rounds + 1) + number, text) for number in range(self.rounds + 1)]
            for level in rotated(list(self.levels), turn):
                with (
                    tempfile.TemporaryDirectory(prefix="crosskv-sparse-") as folder,
                    started(Path(folder), self.settings(level)) as server,
                    closing(Cooling(server, self.model, ANSWER_TOKENS)) as client,
                ):
                    one_round(client, talks[0], tokens)
                    advance()
                    for talk in talks[1:]:
                        found[level].rounds.append(one_round(client, talk, tokens))
                        advance()
        return found

    def setting(self) -> list[str]:
        """Lines for the reader of the tables."""
        return [
            machine_line(),
            f"{self.model}, {default_dtype()}, documents of about {self.tokens:,} tokens, seed {self.seed}",
            f"Questions about each: {self.questions}. Servers of each level: {self.turns}. "
            f"Rounds on each: {self.rounds}, after one that does not count",
        ]


def _tokens_of(folder: Path) -> Tokens:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def main(
    rounds: Rounds = 3,
    turns: Annotated[int, typer.Option(min=1, help="Servers of each level; their order rotates.")] = 2,
    model: Annotated[str, typer.Option(help=f"Of {', '.join(MODELS)}.")] = DEMO,
    levels: Annotated[
        str | None, typer.Option(help=f"Of {', '.join(LEVELS)}; default: off, layers if any, 50.")
    ] = None,
    questions: Annotated[int, typer.Option(min=1, max=11, help="About each round's documents.")] = 11,
    tokens: Annotated[int | None, typer.Option(min=300, help="Of a round's documents.")] = None,
    seed: Annotated[int, typer.Option(min=0)] = 9_100_000,
    docs: Annotated[bool, typer.Option("--write-docs", help="Put the tables into docs/measured/sparse.md.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Measure, print tables, and say which targets were missed."""
    stop_by_signal()
    with one_sentence(ModelError, ServerError, ValueError):
        chosen("model", [model], MODELS)
        default = [OFF, LAYERS, "50"] if model == DEMO else [OFF, "50"]
        wanted = chosen("level", levels.split(",") if levels else default, LEVELS)
        if LAYERS in wanted and model != DEMO:
            raise InputError(
                f"{model} has random weights, which cannot be calibrated; choose another level than layers."
            )
        length = tokens or (DEMO_TOKENS if model == DEMO else WORD_TOKENS)
        plan = Plan(model, wanted, turns, rounds, questions, length, seed)
        with progress_bar("rounds") as progress:
            bar = progress.add_task(model, total=turns * len(wanted) * (rounds + 1))
            found = plan.measured(lambda: progress.advance(bar))
    page = markdown(found, plan.setting(), model == DEMO)
    block = Block(PAGE, BEGIN.format(model=model), END.format(model=model))
    conclude(page, as_json(found, plan.setting()), json_file, misses(found), block if docs else None)


if __name__ == "__main__":
    typer.run(main)
