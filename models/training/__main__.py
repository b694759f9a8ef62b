"""`python -m models.training`: train the demo model (or go on), export it and write its model card."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from models.training.card import write_card
from models.training.train import Trainer

MODELS = Path(__file__).resolve().parent.parent


def main() -> None:
    """Train unless only the card is asked for, then measure and write the card."""
    parser = argparse.ArgumentParser(prog="python -m models.training", description=__doc__)
    parser.add_argument("--seed", type=int, default=0, help="decides the weights' start and every sample")
    parser.add_argument("--work", type=Path, default=MODELS / "work", help="checkpoints and curve; not committed")
    parser.add_argument("--demo", type=Path, default=MODELS / "demo", help="where the model is exported")
    parser.add_argument("--threads", type=int, default=1, help="torch threads")
    parser.add_argument("--fresh", action="store_true", help="start over instead of resuming the run in --work")
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints, measurements and exports")
    parser.add_argument("--card-only", action="store_true", help="measure the exported model and write its card")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if not arguments.card_only:
        Trainer(arguments.work, arguments.demo, arguments.seed, arguments.fresh).run(arguments.every)
    write_card(arguments.demo, arguments.work)


if __name__ == "__main__":
    main()
