"""What less KV costs in answers: `make bench-quality`, or `python -m load_tests.quality`.

By default the demo model answers four kinds of questions over held-out worlds, and the probe model questions whose
documents have to have seen each other. `--model` with `--prompts` asks a user's own: then what counts is whether the
model's own answer comes out the same, and the KL divergence of the next token at every token of it.

Everything is computed in float32 by transformers on the CPU; what is stored is rounded to bfloat16 and goes through the
server's own codecs. Bytes are of whole coded segments. `computed` is the share of the reused part's prefill, in layers
times tokens, that a method computes all the same: what of the time to a first token it cannot save. That time is
measured on a larger model by `load_tests.quality.first_tokens`; its latest result is a column of the table.

`make bench-codec` is about codecs alone: their speed, bits and distance from their tables' entropy. Its questions are
asked of one model at once; here every way to save is asked the same, so that a line in this table can be chosen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoTokenizer

from configs.blending import DEFAULT_CHECK_LAYER, DEFAULT_RECOMPUTE_RATIO, read_blend_profile
from configs.model_folder import find_model
from configs.settings import PROJECT_ROOT, load_settings
from deployments.segment_store.codec_files import find_profile
from kernels.codecs import CodecProfile
from load_tests.blending.forward import why_not
from load_tests.blending.profile import ANSWER_TOKENS, LEAST_CHUNK_TOKENS, case_of
from load_tests.blending.prompts import read_prompts
from load_tests.codec.model import kv_shape, load_model
from load_tests.measuring import report
from load_tests.measuring.plots import new_figure, save
from load_tests.measuring.program import Block, InputError, JsonFile, conclude, one_sentence, out, progress_bar
from load_tests.quality.cases import DEMO, KINDS, PROBE, Case, demo_cases, is_built_in, own_case, probe_cases
from load_tests.quality.first_tokens import FirstTokens, read_first_tokens
from load_tests.quality.measure import PREFILL, Row, measure
from load_tests.quality.methods import methods
from load_tests.quality.sparse import sparse_methods

SEED = 7_600_000
CONVERSATIONS = 50
PAGE = PROJECT_ROOT / "docs" / "measured" / "compression.md"
PLOT = PAGE.with_name("quality.png")
PLACE = Block(PAGE, "<!-- quality: begin -->", "<!-- quality: end -->")


def rows_of(folder: Path | str, cases: Sequence[Case] | None, conversations: int, seed: int) -> list[Row]:
    """All rows of one model; without `cases` its built-in questions. Raises InputError."""
    model = load_model(folder)
    if reason := why_not(model):
        raise InputError(f"{folder} cannot be measured here: {reason}.")
    found = find_profile(str(load_settings({}).kv.codec_profiles_path), str(folder))
    profile = CodecProfile.from_bytes(found.content) if found else CodecProfile.generic(kv_shape(model))
    blend = read_blend_profile(folder)
    check_layer = blend.check_layer if blend else min(DEFAULT_CHECK_LAYER, len(model.model.layers) - 1)
    ratio = blend.recompute_ratio if blend else DEFAULT_RECOMPUTE_RATIO
    if cases is None:
        make = demo_cases if folder == DEMO else probe_cases
        cases = list(make(AutoTokenizer.from_pretrained(folder), conversations, seed))
    rows = methods(profile, check_layer, ratio)
    try:
        rows += sparse_methods(folder, load_model(folder))
    except ValueError as error:
        out.print(f"{folder} has no sparse rows: {error}", markup=False)
    with progress_bar("prompts") as progress:
        task = progress.add_task(Path(folder).name, total=len(cases))
        return measure(model, cases, rows, lambda: progress.advance(task))


def own_cases(folder: Path | str, file: Path, separators: Sequence[str], least_tokens: int, most: int) -> list[Case]:
    """A user's prompts with the answers that the model gives after a whole prefill. Raises InputError."""
    model = load_model(folder)
    prompts, _ = read_prompts(file, AutoTokenizer.from_pretrained(folder), separators, least_tokens, most)
    return [own_case(prompt, case_of(model, prompt, ANSWER_TOKENS).answer) for prompt in prompts]


def table(by_model: dict[str, list[Row]], first_tokens: FirstTokens | None = None) -> str:
    """In Markdown, one table for all models: methods down. `first_tokens` gives a column, of another model's engine."""
    blocks = []
    for model, rows in by_model.items():
        kinds = [kind for kind in KINDS if rows[0].cells[kind].asked]
        body = []
        for row in rows:
            cells = [f"{row.cells[kind].right}/{row.cells[kind].asked}" for kind in kinds]
            kl = "" if row.name == PREFILL else f"{row.kl:.5f}"
            measured = [first_tokens.words(row.name)] if first_tokens else []
            body.append([row.name, f"{row.bytes_ratio:.2f}", f"{row.computed:.0%}", *measured, *cells, kl])
        titles = ["TTFT ÷ prefill"] if first_tokens else []
        blocks.append(report.table([model, "bf16 ÷ bytes", "computed", *titles, *kinds, "KL"], body))
    return "\n\n".join(blocks)


def intervals(by_model: dict[str, list[Row]]) -> str:
    """How sure the cells are, for the caption: the interval of each column's whole prefill."""
    said = []
    for model, (whole, *_) in by_model.items():
        for kind in KINDS:
            if whole.cells[kind].asked:
                low, high = whole.cells[kind].interval
                said.append(f"{model}, {kind} {low:.1%} to {high:.1%}")
    return "The first rows' 95 % intervals follow. " + ". ".join(one[0].upper() + one[1:] for one in said) + "."


def plot(by_model: dict[str, list[Row]], file: Path) -> None:
    """What is computed and stored against what is lost, a panel for each model."""
    figure = new_figure(5 * len(by_model) + 1, 3.8)
    for axes, (model, (whole, *rows)) in zip(
        figure.subplots(1, len(by_model), squeeze=False)[0], by_model.items(), strict=True
    ):
        kinds = [kind for kind in KINDS if whole.cells[kind].asked]
        for kind in kinds:
            lost = [100 * (whole.cells[kind].share - row.cells[kind].share) for row in rows]
            axes.plot(lost, range(len(rows)), "o", label=kind, alpha=0.7)
        axes.set_yticks(range(len(rows)), [f"{row.name} ({row.bytes_ratio:.1f} x)" for row in rows], fontsize=7)
        axes.invert_yaxis()
        axes.set(xlabel="right answers lost, points", title=model)
        axes.grid(alpha=0.3)
        axes.legend(fontsize=7)
    save(figure, file, dpi=110)


def as_json(by_model: dict[str, list[Row]]) -> dict[str, Any]:
    """All numbers."""
    return {
        model: [
            {
                "method": row.name, "times_smaller_than_bf16": row.bytes_ratio, "computed": row.computed, "kl": row.kl,
                "right": {
                    kind: {"right": cell.right, "asked": cell.asked, "interval": cell.interval}
                    for kind, cell in row.cells.items() if cell.asked
                },
            }
            for row in rows
        ]
        for model, rows in by_model.items()
    }  # fmt: skip


def main(
    model: Annotated[str | None, typer.Option(help="A folder; by default the demo and the probe model.")] = None,
    prompts: Annotated[
        Path | None, typer.Option(help="A user's own prompts, JSON lines as `make profile-blend` takes.", exists=True)
    ] = None,
    conversations: Annotated[
        int, typer.Option(min=1, help="Built-in conversations, or most own prompts.")
    ] = CONVERSATIONS,
    seed: Annotated[int, typer.Option(min=0, help="Of the built-in questions.")] = SEED,
    separator: Annotated[list[str] | None, typer.Option(help="What a chunk begins with; repeatable.")] = None,
    min_chunk_tokens: Annotated[int, typer.Option(min=1)] = LEAST_CHUNK_TOKENS,
    first_tokens: Annotated[
        Path | None, typer.Option(help="What `python -m load_tests.quality.first_tokens` has written.")
    ] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", help="Where the plot goes.")] = None,
    write_docs: Annotated[bool, typer.Option("--write-docs", help="Write table and plot into the docs.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Measure, print one table per model, draw the plot."""
    torch.manual_seed(0)
    with one_sentence(ValueError):
        by_model: dict[str, list[Row]] = {}
        for folder in [find_model(model)] if model else [DEMO, PROBE]:
            cases = None
            if prompts:
                cases = own_cases(folder, prompts, separator or [], min_chunk_tokens, conversations)
            elif not is_built_in(folder):
                raise InputError(f"There are no questions for {model}; give prompts of yours with --prompts.")
            by_model[Path(folder).name] = rows_of(folder, cases, conversations, seed)
        times = read_first_tokens(first_tokens)
        text = table(by_model, times) + "\n\n" + intervals(by_model)
        if plot_file:
            plot(by_model, plot_file)
        if write_docs:
            plot(by_model, PLOT)
    measured = {"first_tokens": asdict(times) if times else None, "seed": seed, "conversations": conversations}
    place, in_docs = (PLACE, _docs(by_model, conversations, times)) if write_docs else (None, None)
    conclude(text, as_json(by_model) | measured, json_file, block=place, in_block=in_docs)


def _docs(by_model: dict[str, list[Row]], conversations: int, times: FirstTokens | None) -> str:
    said = f" TTFT: {times.setting}." if times else ""
    caption = (
        f"*`make bench-quality`: {conversations} conversations of each model, float32, one seed. "
        f"{intervals(by_model)}{said}*"
    )
    return f"{table(by_model, times)}\n\n{report.wrapped(caption)}\n\n![answers lost, by method]({PLOT.name})\n"


if __name__ == "__main__":
    typer.run(main)
