"""The model card: measures the exported bf16 model on held-out worlds and writes `demo/README.md` with the table."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from models.training import curriculum
from models.training.evaluate import EVALUATION_SEED, ONE_HOP, Tally, exact_match

# Context in tokens of documents → held-out conversations measured there.
CONTEXTS: dict[int, int] = {256: 100, 512: 100, 1024: 60, 3000: 40}
ROWS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("one hop, all", ONE_HOP),
    ("· where a person lives", ("city",)),
    ("· what a person does", ("job",)),
    ("· instrument", ("instrument",)),
    ("· animal", ("animal",)),
    ("· who owns a thing", ("owner",)),
    ("two hops: where a thing is", ("where",)),
    ("the documents do not say: nobody of that name", ("unknown person",)),
    ("the documents do not say: no such thing", ("unknown thing",)),
    ("the documents do not say: a known thing in another colour", ("other color",)),
    ("the documents do not say: known person, fact not given", ("missing",)),
    ("the documents do not say: a kind of question nothing answers", ("unanswerable",)),
)
CELLS_FILE = "measured.json"


@dataclass(frozen=True)
class Cell:
    """Right answers out of questions asked."""

    right: int
    asked: int

    @property
    def share(self) -> float:
        """Exact match between 0 and 1; not a number where nothing was asked."""
        return self.right / self.asked if self.asked else float("nan")


def measure(folder: Path) -> dict[int, Tally]:
    """Context → kind → (right, asked) of the exported model, in bf16 as it is served."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return {
        context: exact_match(model, tokenizer, context, prompts, EVALUATION_SEED)
        for context, prompts in CONTEXTS.items()
    }


def cell(tally: Tally, kinds: tuple[str, ...]) -> Cell:
    """All questions of `kinds` together."""
    found = [tally[kind] for kind in kinds if kind in tally]
    return Cell(sum(right for right, _ in found), sum(asked for _, asked in found))


def table(measured: dict[int, Tally]) -> str:
    """The measured table in Markdown: question kinds down, context lengths across."""
    head = "| held-out exact match, greedy | " + " | ".join(f"{context:,} tokens" for context in measured) + " |"
    lines = [head, "|---" * (len(measured) + 1) + "|"]
    for name, kinds in ROWS:
        cells = [cell(tally, kinds) for tally in measured.values()]
        lines.append(f"| {name} | " + " | ".join(f"{c.share:.1%} ({c.right}/{c.asked})" for c in cells) + " |")
    return "\n".join(lines)


def _training_line(work: Path) -> str:
    curve = work / "curve.jsonl"
    if not curve.exists():
        return "The curve of the training run is not on this machine."
    last = json.loads(curve.read_text(encoding="utf-8").splitlines()[-1])
    return (
        f"Trained with seed {last['seed']} on {last['tokens'] / 1e6:.1f} million tokens of generated conversations in"
        f" {last['step']:,} steps, {last['seconds'] / 60:.0f} minutes on one shared CPU core."
    )


def write_card(folder: Path, work: Path) -> None:
    """Measure the model in `folder`; write its `README.md` and the raw counts (`measured.json`) beside it."""
    measured = measure(folder)
    raw = {str(context): {kind: list(found) for kind, found in tally.items()} for context, tally in measured.items()}
    (folder / CELLS_FILE).write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
    template = (Path(__file__).parent / "card.md").read_text(encoding="utf-8")
    size = (folder / "model.safetensors").stat().st_size
    text = template.format(
        table=table(measured),
        training=_training_line(work),
        size=f"{size / 1e6:.1f} MB",
        prompts=", ".join(f"{count} at {context:,}" for context, count in CONTEXTS.items()),
        contexts=", ".join(f"{context:,}" for context in sorted({c for s in curriculum.STAGES for c in s.contexts})),
    )
    (folder / "README.md").write_text(text, encoding="utf-8")
