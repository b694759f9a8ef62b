"""The probe's model card: measures the exported bf16 model on held-out worlds and writes `probe/README.md`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import torch
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from models.training.probe.evaluate import Tally, tally
from models.training.probe.train import CONTEXTS, PEAK_RATE, RUN_FILE, STEPS

MEASURED: dict[int, int] = {128: 60, 256: 60, 512: 60, 1024: 30}
"""Context in tokens of documents → held-out conversations of up to four questions measured there."""
EVALUATION_SEED = 9_000
CELLS_FILE = "measured.json"


def measure(folder: Path) -> dict[int, Tally]:
    """Context → counts of the exported model, in bf16 as it is served."""
    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    return {
        context: tally(model, tokenizer, context, conversations, EVALUATION_SEED)
        for context, conversations in MEASURED.items()
    }


def table(measured: dict[int, Tally]) -> str:
    """In Markdown: whole prefill and naively joined KV down, context lengths across."""
    head = "| two hops, held-out exact match, greedy | "
    lines = [
        head + " | ".join(f"{context:,} tokens" for context in measured) + " |",
        "|---" * (len(measured) + 1) + "|",
    ]
    for name, field in (("whole prefill", "full"), ("KV of each document computed alone, joined", "alone")):
        counts = [(getattr(one, field), one.asked) for one in measured.values()]
        lines.append(f"| {name} | " + " | ".join(f"{r / n:.1%} ({r}/{n})" for r, n in counts) + " |")
    return "\n".join(lines)


def write_card(folder: Path, work: Path) -> None:
    """Measure the model in `folder`; write its `README.md` and the raw counts (`measured.json`) beside it."""
    measured = measure(folder)
    raw = {str(context): asdict(counts) for context, counts in measured.items()}
    (folder / CELLS_FILE).write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
    run = work / RUN_FILE
    training = "The record of the training run is not on this machine."
    if run.exists():
        state = json.loads(run.read_text(encoding="utf-8"))
        training = (
            f"Fine-tuned from the demo model with seed {state['seed']} in {state['step']:,} steps on"
            f" {state['tokens'] / 1e6:.1f} million tokens of generated conversations,"
            f" {state['seconds'] / 60:.0f} minutes on one shared CPU core."
        )
    template = (Path(__file__).parent / "card.md").read_text(encoding="utf-8")
    (folder / "README.md").write_text(
        template.format(
            table=table(measured),
            training=training,
            size=f"{(folder / 'model.safetensors').stat().st_size / 1e6:.1f} MB",
            conversations=", ".join(f"{count} at {context:,}" for context, count in MEASURED.items()),
            contexts=", ".join(f"{context:,}" for context in sorted({c for _, of in CONTEXTS for c in of})),
            steps=f"{STEPS:,}",
            rate=f"{PEAK_RATE:g}",
        ),
        encoding="utf-8",
    )
