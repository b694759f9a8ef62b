"""Blended answers of the probe model in a real engine, compared with a prefill's: `python -m load_tests.quality.engine`

The probe model's answers show whether documents have seen each other, so here blending can fail: with rows that are
drawn by chance, and with none of the reused ones, it has to. One engine in this process, chunks in memory, no HTTP.
Exit codes: 0 measured, 1 a target was missed, 2 something is missing or wrong.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import typer
from transformers import AutoTokenizer

from configs.blend_profile import read_blend_profile
from configs.blend_section import DEFAULT_CHECK_LAYER, DEFAULT_RECOMPUTE_RATIO
from configs.model_folder import PROJECT_ROOT
from load_tests.bench.choice import default_dtype
from load_tests.harness.engine import start_with_engine_threads
from load_tests.measuring.processes import machine_line
from load_tests.measuring.program import EXIT_INPUT, Block, JsonFile, conclude, out, progress_bar
from load_tests.measuring.report import table, wrapped
from load_tests.quality.cases import PROBE
from load_tests.quality.engine.asking import Asking
from load_tests.quality.engine.judge import ARMS, BLENDED, NAIVE, RANDOM, WHOLE, Arm, judged
from load_tests.quality.engine.questions import questions
from load_tests.quality.measure import Cell

QUESTIONS, CONTEXT, SEED = 200, 512, 8_100_000
MOST_LOST_POINTS, MOST_KL = 1.0, 0.002
LEAST_POINTS_BELOW = {RANDOM: 15.0, NAIVE: 30.0}
PAGE = PROJECT_ROOT / "docs" / "measured" / "blending.md"
BEGIN = "<!-- answers: written by python -m load_tests.quality.engine --write-docs -->"
END_MARK = "<!-- end of answers -->"


def lines(found: Mapping[str, Arm]) -> str:
    """A row for each arm, in Markdown."""
    rows = []
    for name in ARMS:
        arm = found[name]
        cell = Cell(sum(arm.right), len(arm.right))
        low, high = cell.interval
        kl = ["", ""] if name == WHOLE else [f"{arm.kl:.5f}", f"{max(arm.divergences):.3f}"]
        below = "" if name == WHOLE else f"{points_below(found, name):.1f}"
        rows.append([name, f"{cell.right}/{cell.asked}", f"{low:.1%} to {high:.1%}", below, *kl, target(name)])
    return table(["in the engine", "right", "95 %", "points below", "KL, mean", "KL, worst step", "target"], rows)


def points_below(found: Mapping[str, Arm], name: str) -> float:
    """Percentage points that an arm is worse than a prefill."""
    return 100 * (found[WHOLE].share - found[name].share)


def target(name: str) -> str:
    """In words."""
    if name == BLENDED:
        return f"≤ {MOST_LOST_POINTS:g} below, KL ≤ {MOST_KL:g}"
    return f"≥ {LEAST_POINTS_BELOW[name]:g} below" if name in LEAST_POINTS_BELOW else ""


def misses(found: Mapping[str, Arm]) -> list[str]:
    """A sentence for each target that was missed."""
    said = []
    if (below := points_below(found, BLENDED)) > MOST_LOST_POINTS:
        said.append(f"Missed: blended answers are {below:.1f} points below a prefill's.")
    if (kl := found[BLENDED].kl) > MOST_KL:
        said.append(f"Missed: blended answers have a KL of {kl:.5f}; the target is at most {MOST_KL:g}.")
    for name, least in LEAST_POINTS_BELOW.items():
        if (below := points_below(found, name)) < least:
            said.append(f"Missed: {name}: {below:.1f} points below, not {least:g}: the questions show nothing.")
    return said


def main(
    asked: Annotated[int, typer.Option("--questions", min=1)] = QUESTIONS,
    context: Annotated[int, typer.Option(min=128, max=1024, help="Tokens of the documents.")] = CONTEXT,
    check_layer: Annotated[int | None, typer.Option(min=1, help="Default: the model's own.")] = None,
    ratio: Annotated[float | None, typer.Option(min=0, max=1, help="Default: the model's own.")] = None,
    dtype: Annotated[str, typer.Option(help="`auto`: as a server's on this machine.")] = "auto",
    seed: Annotated[int, typer.Option(min=0, help="Of the questions.")] = SEED,
    docs: Annotated[bool, typer.Option("--write-docs", help="Put the table into docs/measured/blending.md.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Ask, print a table, and say which targets were missed."""
    own = read_blend_profile(PROBE)
    layer = check_layer or (own.check_layer if own else DEFAULT_CHECK_LAYER)
    share = ratio if ratio is not None else own.recompute_ratio if own else DEFAULT_RECOMPUTE_RATIO
    kind = default_dtype() if dtype == "auto" else dtype
    chosen = list(questions(AutoTokenizer.from_pretrained(PROBE), asked, context, seed))
    asking = Asking(str(PROBE), kind, layer, share)
    try:
        with progress_bar("questions") as progress:
            bar = progress.add_task("probe", total=len(chosen))
            found = judged(asking, chosen, lambda: progress.advance(bar))
    except RuntimeError as error:
        out.print(str(error), markup=False)
        raise typer.Exit(EXIT_INPUT) from None
    finally:
        asking.close()
    setting = (
        f"*Probe model, {kind}, {len(chosen)} held-out questions of two hops, documents of {context} tokens together, "
        f"check layer {layer}, ratio {share:g}, seed {seed}. {machine_line()}.*"
    )
    said = misses(found)
    text = "\n\n".join([wrapped(setting), lines(found), *(said or ["All targets are reached."])])
    block = Block(PAGE, BEGIN, END_MARK) if docs else None
    conclude(text, _as_json(found, setting, said), json_file, said, block)


def _as_json(found: Mapping[str, Arm], setting: str, said: list[str]) -> dict[str, Any]:
    arms = {
        name: {"right": sum(arm.right), "asked": len(arm.right), "kl": arm.kl, "divergences": arm.divergences}
        for name, arm in found.items()
    }
    return {"setting": setting, "arms": arms, "misses": said}


if __name__ == "__main__":
    start_with_engine_threads("load_tests.quality.engine")
    typer.run(main)
