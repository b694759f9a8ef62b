"""`python -m models.training.probe`: fine-tune the demo model into the probe model, export it and write its card."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from models.training.export import export
from models.training.probe.card import write_card
from models.training.probe.prompts import heldout_dialogue
from models.training.probe.train import STEPS, ProbeTrainer

CALIBRATION_SEED = 4_000_000
"""Of worlds that no question of the card or of a test is about."""
CALIBRATION_PROMPTS, CALIBRATION_CONTEXT = 40, 512
MODELS = Path(__file__).resolve().parents[2]


def write_prompts(file: Path) -> None:
    """Chats with documents of 512 tokens and one two-hop question each; the demo model can be asked them too."""
    lines = []
    for number in range(CALIBRATION_PROMPTS):
        dialogue = heldout_dialogue(CALIBRATION_SEED + number, CALIBRATION_CONTEXT, turns=1)
        messages = dialogue.messages(1, last_answer=False)
        lines.append(json.dumps({"messages": messages, "documents": dialogue.documents}))
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Train unless only the card is asked for; once training is over, export, measure and write the card."""
    parser = argparse.ArgumentParser(prog="python -m models.training.probe", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="decides every sample")
    parser.add_argument("--base", type=Path, default=MODELS / "demo", help="the model to start from")
    parser.add_argument("--work", type=Path, default=MODELS / "work" / "probe", help="checkpoints; not committed")
    parser.add_argument("--probe", type=Path, default=MODELS / "probe", help="where the model is exported")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--fresh", action="store_true", help="start over instead of resuming the run in --work")
    parser.add_argument("--steps", type=int, default=STEPS, help="stop after so many more; a later call goes on")
    parser.add_argument("--card-only", action="store_true", help="measure the exported model and write its card")
    parser.add_argument("--prompts", type=Path, help="only write prompts as JSON lines, for `make profile-blend`")
    arguments = parser.parse_args()
    if arguments.prompts:
        write_prompts(arguments.prompts)
        return
    torch.set_num_threads(arguments.threads)
    if not arguments.card_only:
        trainer = ProbeTrainer(arguments.work, arguments.base, arguments.seed, arguments.fresh)
        if not trainer.run(arguments.steps):
            return
        export(trainer.model, arguments.probe)
    write_card(arguments.probe, arguments.work)


if __name__ == "__main__":
    main()
