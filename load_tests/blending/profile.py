"""Calibrate blending on a user's prompts: `make profile-blend MODEL=… DATA=prompts.jsonl`.

For each prompt the model answers greedily after a whole prefill. Then its chunks' KV, computed alone and rounded to
bfloat16 as it is stored, is blended at each check layer and ratio, and the same answer is read after it. What counts is
the mean KL divergence of the next token's distribution, in nats, at the prompt's last token and at the answer's.

Found is the smallest check layer whose KL is within the target at one of the ratios, and the smallest such ratio. It is
written as `crosskv_blend.json` next to the weights, where the server looks for it. Where nothing is within the target,
nothing is written and the exit code is 1.

Everything is computed in float32 on the CPU by transformers (`load_tests.blending.forward`), not in the engine. A model
with random weights cannot be calibrated: its answers do not depend on what a chunk says.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoTokenizer

from configs.blending import BLEND_PROFILE_FILE, BlendProfile, profile_folder
from configs.model_folder import find_model
from load_tests.blending.forward import Prefill, blend, moves_truly, prefill, stored_chunks, why_not
from load_tests.blending.prompts import Prompt, read_prompts
from load_tests.codec.model import continued, divergence, load_model
from load_tests.measuring import report
from load_tests.measuring.program import EXIT_FELL_SHORT, InputError, JsonFile, one_sentence, out, progress_bar

RATIOS = (0.05, 0.1, 0.15, 0.3)
TARGET_KL = 0.002
ANSWER_TOKENS = 16
PROMPTS = 32
LEAST_CHUNK_TOKENS = 64


@dataclass(frozen=True)
class Point:
    """One check layer and ratio, over all prompts; check layer 0 with ratio 0 is naive reuse."""

    check_layer: int
    ratio: float
    kl: float
    worst_kl: float
    """The largest mean of one prompt."""


@dataclass(frozen=True)
class Case:
    """A prompt with its answer, read whole."""

    prompt: Prompt
    answer: list[int]
    full: Prefill
    """Of the prompt and the answer's tokens but the last."""

    @property
    def ids(self) -> list[int]:
        """Of the prompt and the answer's tokens but the last."""
        return [*self.prompt.ids, *self.answer[:-1]]


@torch.inference_mode()
def case_of(model: Any, prompt: Prompt, answer_tokens: int) -> Case:
    """Answer the prompt where its answer is not given, and read both."""
    answer = prompt.answer[:answer_tokens]
    if not answer:
        ids = torch.tensor([prompt.ids])
        made = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=answer_tokens, do_sample=False, num_beams=1
        )
        answer = made[0, len(prompt.ids) :].tolist()
    return Case(prompt, answer, prefill(model, [*prompt.ids, *answer[:-1]]))


def divergences(model: Any, case: Case, points: Sequence[tuple[int, float]]) -> list[float]:
    """The mean KL over the answer's tokens of blending this case at each (check layer, ratio)."""
    chunks = stored_chunks(model, case.prompt.ids, case.prompt.chunks)
    first = len(case.prompt.ids) - 1
    exact = case.full.logits[first:]
    found = []
    for check_layer, ratio in points:
        kv = blend(model, case.full, chunks, check_layer, ratio)
        # What ends with a chunk still has its last token to compute: the answer's first distribution is there.
        stop = min(kv.shape[2], first)
        logits = continued(model, kv[:, :, :stop], case.ids[stop:])
        found.append(float(divergence(exact, logits[first - stop :]).mean()))
    return found


def measure(
    model: Any, prompts: Sequence[Prompt], check_layers: Sequence[int], ratios: Sequence[float], answer_tokens: int
) -> list[Point]:
    """Naive reuse first, then every check layer with every ratio. Raises InputError for keys that do not move."""
    grid = [(0, 0.0), *((layer, ratio) for layer in check_layers for ratio in sorted(ratios))]
    columns: list[list[float]] = []
    with progress_bar("prompts") as progress:
        task = progress.add_task("blending", total=len(prompts))
        for prompt in prompts:
            case = case_of(model, prompt, answer_tokens)
            chunks = stored_chunks(model, prompt.ids, prompt.chunks)
            if not all(moves_truly(model, case.full, chunk) for chunk in chunks):
                raise InputError("Keys of this model do not move to other positions by its own rotation.")
            columns.append(divergences(model, case, grid))
            progress.advance(task)
    return [
        Point(layer, ratio, sum(values) / len(values), max(values))
        for (layer, ratio), values in zip(grid, zip(*columns, strict=True), strict=True)
    ]


def choose(points: Sequence[Point], target: float) -> Point | None:
    """The smallest check layer within the target at some ratio, and there the smallest ratio; naive reuse is none."""
    within = [point for point in points if point.check_layer > 0 and point.kl <= target]
    return min(within, key=lambda point: (point.check_layer, point.ratio), default=None)


def table(points: Sequence[Point], chosen: Point | None) -> str:
    """In Markdown."""
    body = [
        [
            "naive reuse" if point.check_layer == 0 else str(point.check_layer),
            f"{point.ratio:g}", f"{point.kl:.5f}", f"{point.worst_kl:.5f}", "chosen" if point == chosen else "",
        ]
        for point in points
    ]  # fmt: skip
    return report.table(["check layer", "ratio", "mean KL", "worst prompt", ""], body)


def write_profile(folder: Path, profile: BlendProfile) -> Path:
    """Replace the folder's profile at once. Raises InputError that names the path."""
    path = folder / BLEND_PROFILE_FILE
    try:
        with tempfile.NamedTemporaryFile("w", encoding="utf-8", dir=folder, prefix=".blend-", delete=False) as file:
            file.write(profile.model_dump_json(indent=1) + "\n")
        made = Path(file.name)
        made.chmod(0o644)
        made.replace(path)
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}).") from None
    return path


def _check_writable(folder: Path) -> None:
    try:
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise InputError(
            f"{folder / BLEND_PROFILE_FILE} cannot be written ({error.strerror}); copy the model into a folder of "
            "yours, or name another place with --out."
        ) from None


def main(
    data: Annotated[Path, typer.Option(help="JSON lines: messages or prompt.", exists=True, dir_okay=False)],
    model: Annotated[str, typer.Option(help="A folder in Hugging Face's format, or a hub id.")] = "models/demo",
    kl: Annotated[float, typer.Option(min=0, help="The target: most mean KL, in nats.")] = TARGET_KL,
    deepest: Annotated[int | None, typer.Option(min=1, help="Largest check layer; half of them by default.")] = None,
    separator: Annotated[
        list[str] | None, typer.Option(help="What a chunk begins with, as blending.separators; repeatable.")
    ] = None,
    min_chunk_tokens: Annotated[int, typer.Option(min=1, help="Shorter chunks are none.")] = LEAST_CHUNK_TOKENS,
    prompts: Annotated[int, typer.Option(min=1, help="Most prompts to read.")] = PROMPTS,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer to judge.")] = ANSWER_TOKENS,
    folder: Annotated[Path | None, typer.Option("--out", help="Where to write instead, a folder.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Measure, say what was found, and write it next to the weights."""
    torch.manual_seed(0)
    with one_sentence(ValueError):
        source = find_model(model)
        loaded = load_model(source)
        target = folder or profile_folder(source)
        if target is None:
            raise InputError(f"{model} is in no folder of this machine; download it and give its folder.")
        _check_writable(target)
        if reason := why_not(loaded):
            raise InputError(f"{model} cannot be blended: {reason}.")
        tokenizer = AutoTokenizer.from_pretrained(source)
        found, without = read_prompts(data, tokenizer, separator or [], min_chunk_tokens, prompts)
        layers = range(1, min(deepest or len(loaded.model.layers) // 2, len(loaded.model.layers) - 1) + 1)
        points = measure(loaded, found, layers, RATIOS, answer_tokens)
        chosen = choose(points, kl)
        text = table(points, chosen)
        made = {"model": model, "target": kl, "prompts": len(found), "without_chunks": without}
        report.deliver(text, made | {"points": [vars(point) for point in points]}, json_file)
        if without:
            out.print(f"{without} prompts had no chunk and were left out.")
        if chosen is None:
            out.print(f"No check layer up to {layers[-1]} comes within a KL of {kl:g}; nothing is written.")
            raise typer.Exit(EXIT_FELL_SHORT)
        versions = {name: version(name) for name in ("torch", "transformers")}
        profile = BlendProfile(
            check_layer=chosen.check_layer, recompute_ratio=chosen.ratio, kl=chosen.kl, prompts=len(found),
            seed=0, versions=versions,
        )  # fmt: skip
        path = write_profile(target, profile)
        out.print(f"{path}: check layer {chosen.check_layer}, ratio {chosen.ratio:g}, KL {chosen.kl:.5f}")


if __name__ == "__main__":
    typer.run(main)
