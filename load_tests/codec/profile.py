"""Measure a model's codec profile: `make profile-codec MODEL=models/demo`, or `python -m load_tests.codec.profile`.

The model reads some 60 prompts on the CPU. Measured are each channel's mean and deviation, the distributions, whether
anchors save bits, and how sensitive each layer's K and V are; from that follow the steps of each level: those of least
KL divergence at the level's size. The profile is written to `.crosskv/profiles`, where the server looks for it.

The prompts: for the demo model conversations about its own worlds, of training facts, so that no home, job or owner in
them is in a held-out world, on which the profile is judged; for any other the text of ``--text``, or without it the
licences and readmes of the installed packages. The same seed on the same machine makes the same profile; ``--check``
makes it again and compares.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.progress import Progress
from transformers import AutoTokenizer

from configs.model_folder import find_model
from configs.settings import load_settings
from deployments.segment_store.codec_files import model_digest, profile_path
from kernels.codecs.profile import LEVELS, CodecProfile
from kernels.codecs.step_plan import plan_for
from load_tests.codec.model import kv_shape, load_model
from load_tests.codec.profile_measure import (
    BITS,
    PROBES,
    Distributions,
    Probe,
    Sample,
    assemble,
    distributions,
    halves_apart,
    layer_groups,
    level_factors,
    sensitivities,
)
from load_tests.codec.questions import DEMO, MEASURED_KINDS, conversations
from load_tests.measuring.program import EXIT_FELL_SHORT, InputError, JsonFile, one_sentence, out
from load_tests.measuring.report import write_json

PROMPTS, PROBED = 64, 24
QUICK_PROMPTS, QUICK_PROBED = 4, 1
PROFILE_SEED = 5_000_000
PREFIX_TOKENS, REST_TOKENS = 512, 64
LEAST_TEXT_TOKENS = 4 * (PREFIX_TOKENS + REST_TOKENS)


def demo_samples(count: int, seed: int) -> list[Sample]:
    """Conversations about worlds as the model was trained on: of facts that no held-out world has."""
    found = conversations(count * len(MEASURED_KINDS), seed, heldout=False)
    return [
        Sample(c.prefix, c.rest, [at for first, end in c.answers for at in range(first - 1, end - 1)]) for c in found
    ]


def text_samples(model: str, text: str, count: int) -> list[Sample]:
    """Pieces of a text, from all over it. Raises ValueError for too short a text."""
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    ids = tokenizer.encode(text[: 40 * count * (PREFIX_TOKENS + REST_TOKENS)], add_special_tokens=False)
    if len(ids) < LEAST_TEXT_TOKENS:
        raise ValueError(f"the text has {len(ids)} tokens; a profile needs {LEAST_TEXT_TOKENS} at least")
    length = PREFIX_TOKENS + REST_TOKENS
    starts = np.linspace(0, len(ids) - length, count).astype(int).tolist()
    return [Sample(ids[at : at + PREFIX_TOKENS], ids[at + PREFIX_TOKENS : at + length]) for at in starts]


def installed_text(seed: int) -> str:
    """Licences and readmes of this environment, in a random order."""
    roots = {Path(entry) for entry in sys.path if entry.endswith("site-packages")}
    files = sorted(
        file for root in roots for name in ("METADATA", "LICENSE*") for file in root.glob(f"*.dist-info/**/{name}")
    )
    random.Random(seed).shuffle(files)
    return "\n\n".join(file.read_text(errors="ignore", encoding="utf-8") for file in files if file.is_file())


def make_profile(
    model: Any, samples: Sequence[Sample], probed: int, name: bytes
) -> tuple[CodecProfile, dict[str, Any]]:
    """The profile, and what was measured on the way, for people."""
    layers, *heads = kv_shape(model)
    steps = 2 * len(samples) + 2 * len(PROBES) * len(layer_groups(layers)) + len(LEVELS)
    with Progress(console=out) as progress:
        task = progress.add_task("distributions", total=steps)

        def tick() -> None:
            progress.advance(task)

        found = distributions(model, samples, tick)
        progress.update(task, description="sensitivity")
        probe = Probe(model, samples[:probed], found)
        sensitivity = sensitivities(probe, found, tick)
        progress.update(task, description="steps")
        chosen = {level: level_factors(found, sensitivity, BITS[level]) for level in LEVELS}
        cost = {}
        for level, factors in chosen.items():
            cost[level] = probe.divergence(factors)
            tick()
        apart = halves_apart(probe, layers)
    profile = assemble(found, chosen, name, (heads[0], heads[1]))
    report = {
        "prompts": len(samples),
        "probed": probed,
        "kl_of_steps_of_1": apart,
        "kl_per_squared_error": sensitivity.tolist(),
        "anchors": [[half.anchors is not None for half in pair] for pair in profile.halves],
        "levels": {
            level: {"kl": cost[level], "factors": factors.tolist(), "bits": _bits(found, factors)}
            for level, factors in chosen.items()
        },
    }
    return profile, report


def _bits(found: Distributions, factors: np.ndarray) -> float:
    """Per element, without anchors."""
    return float(
        np.mean(
            [plan_for(found.plain[layer][half], float(factor))[1] for (layer, half), factor in np.ndenumerate(factors)]
        )
    )


def main(
    model: Annotated[str, typer.Option(help="A folder in Hugging Face's format.")] = "models/demo",
    text: Annotated[Path | None, typer.Option(help="A text for the prompts.", exists=True, dir_okay=False)] = None,
    output: Annotated[
        Path | None, typer.Option("--out", help="Where to write; into `.crosskv/profiles` by default.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=2, help="How many prompts to read.")] = PROMPTS,
    seed: Annotated[int, typer.Option(help="Of the choice of conversations, or of readmes.")] = PROFILE_SEED,
    check: Annotated[
        bool, typer.Option("--check", help="Write nothing: is the file there what would be made?")
    ] = False,
    quick: Annotated[bool, typer.Option("--quick", help="A rough profile from few prompts.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Measure, write the profile, and say what it will do."""
    count, probed = (QUICK_PROMPTS, QUICK_PROBED) if quick else (prompts, PROBED)
    torch.manual_seed(0)
    with one_sentence(ValueError):
        folder = find_model(model)
        if isinstance(folder, str):
            raise InputError(f"A profile is made from a folder of weights; download {model} and give its folder.")
        if folder == DEMO and text is None:
            source, samples = "conversations about the demo model's worlds", demo_samples(count, seed)
        else:
            source = str(text) if text else "licences and readmes of the installed packages"
            words = text.read_text(encoding="utf-8") if text else installed_text(seed)
            samples = text_samples(str(folder), words, count)
    out.print(f"{model}: {len(samples)} prompts from {source}")
    name = model_digest(str(folder))
    profile, report = make_profile(load_model(folder), samples, min(probed, len(samples)), name)
    target = output or profile_path(str(load_settings({}).kv.codec_profiles_path), str(folder))
    if check and not (target.is_file() and target.read_bytes() == profile.to_bytes()):
        out.print(f"{target} is not what this makes here ({profile.digest.hex()}); make it again without --check")
        raise typer.Exit(EXIT_FELL_SHORT)
    if not check:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(profile.to_bytes())
    levels = "; ".join(f"level {n}: {of['bits']:.2f} bits, KL {of['kl']:.5f}" for n, of in report["levels"].items())
    out.print(f"{target}: {len(profile.to_bytes())} bytes, {profile.digest.hex()}; {levels}")
    write_json(report | {"source": source, "seed": seed}, json_file)


if __name__ == "__main__":
    typer.run(main)
