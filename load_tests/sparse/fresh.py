"""The demo model's calibrated budgets, judged on questions not used to tune them: `python -m load_tests.sparse.fresh`

`make bench-sparse` always asks the same questions, and work on budgets looks at them. These seeds were first asked
once the budgets were decided; another change of budgets takes other seeds. Exit codes: 0 nothing is lost, 1 something
is.
"""

from __future__ import annotations

from typing import Annotated, Any

import torch
import typer

from configs.settings import PROJECT_ROOT
from deployments.segment_store.sparse.budget_files import KEPT_PROFILE_FILE, find_budgets
from kernels.codecs import CodecProfile, make_codec
from kernels.sparse.section import SparseForm
from kvmanager.extensions.sparse.budgets import LAYERS
from load_tests.codec.model import kv_shape, load_model
from load_tests.codec.questions import DEMO, conversations
from load_tests.measuring.program import Block, JsonFile, conclude, progress_bar
from load_tests.measuring.report import table
from load_tests.sparse.calibrate import MOST_KL
from load_tests.sparse.judge import Cost, cost_of, hold
from load_tests.sparse.masked_model import MaskedModel

SEEDS = (31_000_000, 32_000_000, 33_000_000)
QUESTIONS = 198
MOST_KEPT = 0.5
PLAIN, CODED = "layers", "layers, CacheGen 2"
PAGE = PROJECT_ROOT / "docs" / "concepts" / "compression.md"
BEGIN = "<!-- fresh: written by python -m load_tests.sparse.fresh --write-docs -->"
END_MARK = "<!-- end of fresh -->"

Found = dict[int, dict[str, Cost]]
"""By seed and form."""


def measure(seeds: list[int], questions: int, tick: Any = lambda: None) -> Found:
    """What every seed's questions lose, the kept tokens as they are and through a codec."""
    masked = MaskedModel(load_model(DEMO))
    budgets = find_budgets(str(DEMO), LAYERS, kv_shape(masked.model)[0])
    profile = CodecProfile.from_bytes((DEMO / KEPT_PROFILE_FILE).read_bytes())
    forms = {PLAIN: SparseForm(), CODED: SparseForm(make_codec("cachegen", 2, profile))}
    found: Found = {}
    for seed in seeds:
        held = hold(masked, conversations(questions, seed))
        found[seed] = {name: cost_of(masked, held, budgets, form) for name, form in forms.items()}
        tick()
    return found


def lines(found: Found) -> str:
    """In Markdown, a row for each seed and form."""
    rows = []
    for seed, costs in found.items():
        for name, cost in costs.items():
            ratio = cost.raw_bytes / cost.coded_bytes
            lost = f"{cost.lost}, {cost.gained}"
            kl = [f"{cost.kl:.5f}", f"{cost.worst_kl:.4f}"]
            rows.append([f"{seed:,}", name, f"{cost.kept:.1%}", f"{ratio:.2f}", f"{cost.questions}", lost, *kl])
    head = ["seed", "stored", "kept", "bf16 ÷ bytes", "questions", "lost, gained", "KL", "KL, worst kind"]
    return table(head, rows)


def misses(found: Found) -> list[str]:
    """Of the budgets themselves, a sentence for each seed that loses something."""
    said = []
    for seed, costs in found.items():
        cost = costs[PLAIN]
        if cost.lost:
            said.append(f"Missed: seed {seed:,} loses {cost.lost} of {cost.questions} answers; the target is none.")
        if cost.kl > MOST_KL:
            said.append(f"Missed: seed {seed:,} has a KL of {cost.kl:.5f}; the target is at most {MOST_KL:g}.")
        if cost.kept > MOST_KEPT:
            said.append(f"Missed: seed {seed:,} keeps {cost.kept:.1%}; the target is at most {MOST_KEPT:.0%}.")
    return said


def main(
    seeds: Annotated[str, typer.Option(help="With commas between them.")] = ",".join(map(str, SEEDS)),
    questions: Annotated[int, typer.Option(min=11, help="Of each seed.")] = QUESTIONS,
    docs: Annotated[
        bool, typer.Option("--write-docs", help="Put the table into docs/concepts/compression.md.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """Ask, print a table, and say what is lost."""
    torch.manual_seed(0)
    numbers = [int(word) for word in seeds.split(",")]
    with progress_bar("seeds") as progress:
        bar = progress.add_task("demo model", total=len(numbers))
        found = measure(numbers, questions, lambda: progress.advance(bar))
    said = misses(found)
    rows = {str(seed): {name: cost.as_row() for name, cost in costs.items()} for seed, costs in found.items()}
    block = Block(PAGE, BEGIN, END_MARK) if docs else None
    conclude("\n\n".join([lines(found), *said]), {"seeds": rows, "misses": said}, json_file, said, block, lines(found))


if __name__ == "__main__":
    typer.run(main)
