"""Sparse KV measured on the demo model: `make bench-sparse`, or `python -m load_tests.sparse.table`.

Three tables over held-out questions: the levels; the calibrated level with a codec on top; and which layers may lose
tokens at all. Every arm answers the same questions from the same prefixes, whose KV is that of bfloat16; the
calibration saw none of these worlds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
import typer
from rich.progress import track

from deployments.segment_store.sparse.budget_files import KEPT_PROFILE_FILE, find_budgets
from kernels.codecs import LEVELS as CODEC_LEVELS
from kernels.codecs import CodecProfile, make_codec
from kernels.sparse.section import SparseForm
from kvmanager.extensions.sparse.budgets import LAYERS, LEVELS
from load_tests.codec.model import kv_shape, load_model
from load_tests.codec.questions import DEMO, conversations
from load_tests.codec.table import QUESTIONS, SEED, demo_profile
from load_tests.measuring import report
from load_tests.measuring.program import JsonFile, conclude, out
from load_tests.sparse.calibrate import MOST_KL, QUESTIONS_PER_LOST
from load_tests.sparse.judge import cost_of, hold
from load_tests.sparse.layer_groups import group_rows
from load_tests.sparse.masked_model import MaskedModel

MOST_KEPT = 0.5
LEAST_RATIO, MOST_LOST_CODED = 13.0, 3
"""Issue 18."""
CODED = "cachegen 2"

Row = dict[str, Any]


def measure(questions: int, seed: int) -> dict[str, Any]:
    """Rows of all three tables, and how many questions the whole KV answers right."""
    masked = MaskedModel(load_model(DEMO))
    layers = kv_shape(masked.model)[0]
    held = hold(masked, track(list(conversations(questions, seed)), "whole KV", console=out))
    calibrated = find_budgets(str(DEMO), LAYERS, layers)
    levels = [
        {"level": level} | cost_of(masked, held, find_budgets(str(DEMO), level, layers), SparseForm()).as_row()
        for level in track(LEVELS, "levels", console=out)
    ]
    coded = [
        {"codec": name} | cost_of(masked, held, calibrated, form).as_row()
        for name, form in track(forms(), "codecs", console=out)
    ]
    groups = group_rows(layers, lambda budgets: cost_of(masked, held, budgets))
    asked = [right for one in held for right in one.right]
    return {
        "questions": len(asked),
        "right": sum(asked),
        "eighths": [float(8 * share) for share in calibrated.shares],
        "levels": levels,
        "coded": coded,
        "groups": groups,
    }


def forms() -> list[tuple[str, SparseForm]]:
    """What stands on top of the calibrated level; `dense profile`: CacheGen's profile for KV of which all is kept."""
    kept = CodecProfile.from_bytes((DEMO / KEPT_PROFILE_FILE).read_bytes())
    found = [("raw", SparseForm()), ("int8", SparseForm(make_codec("int8")))]
    found += [(f"cachegen {level}", SparseForm(make_codec("cachegen", level, kept))) for level in CODEC_LEVELS]
    return [*found, (f"{CODED}, dense profile", SparseForm(make_codec("cachegen", 2, demo_profile())))]


def tables(found: dict[str, Any]) -> str:
    """Markdown."""
    cells = {
        "kept": "{kept:.1%}", "bf16 ÷ bytes": "{times_smaller_than_bf16:.2f}", "exact match": "{right}/{questions}",
        "lost, gained": "{lost}, {gained}", "KL": "{kl:.5f}", "KL, worst kind": "{worst_kl:.4f}",
    }  # fmt: skip
    parts = []
    for name, first in (("levels", ("level",)), ("coded", ("codec",)), ("groups", ("group", "layers"))):
        rows: Sequence[Row] = found[name]
        titles = [title for title in cells if title != "bf16 ÷ bytes" or name != "groups"]
        body = [
            [*(row[key] for key in first)]
            + [cells[title].format(**row, right=found["right"] - row["lost"] + row["gained"]) for title in titles]
            for row in rows
        ]
        parts.append(report.table([*first, *titles], body))
    return "\n\n".join(parts)


def missed(found: dict[str, Any]) -> list[str]:
    """What falls short of issue 18, in words."""
    words = []
    layers = next(row for row in found["levels"] if row["level"] == LAYERS)
    if layers["kept"] > MOST_KEPT:
        words.append(f"the calibrated budgets keep {layers['kept']:.1%}, more than {MOST_KEPT:.0%}")
    if layers["kl"] > MOST_KL:
        words.append(f"the calibrated budgets have a KL of {layers['kl']:.4f}, more than {MOST_KL}")
    if layers["lost"] > max(1, found["questions"] // QUESTIONS_PER_LOST):
        words.append(f"the calibrated budgets lose {layers['lost']} answers of {found['questions']}")
    coded = next(row for row in found["coded"] if row["codec"] == CODED)
    if coded["times_smaller_than_bf16"] < LEAST_RATIO:
        words.append(
            f"{CODED} on top is {coded['times_smaller_than_bf16']:.2f} times smaller, less than {LEAST_RATIO:g}"
        )
    if coded["lost"] > MOST_LOST_CODED:
        words.append(f"{CODED} on top loses {coded['lost']} answers of {found['questions']}")
    return words


def main(
    questions: Annotated[int, typer.Option(min=11, help="Held-out questions to ask.")] = QUESTIONS,
    seed: Annotated[int, typer.Option(min=0, help="Of the questions.")] = SEED,
    json_file: JsonFile = None,
) -> None:
    """Measure, print tables in Markdown, and say what falls short."""
    torch.manual_seed(0)
    found = measure(questions, seed)
    falls_short = missed(found)
    conclude(tables(found), found | {"seed": seed, "falls_short": falls_short}, json_file, falls_short)


if __name__ == "__main__":
    typer.run(main)
