"""Measure a model's budgets of sparse KV: `make profile-sparse MODEL=models/demo`.

The model reads some prompts on the CPU, once with all KV and then again and again with less of it
(`load_tests.sparse.calibrate`). Written next to the weights: the budgets, which say per layer what may be dropped with
no measured loss, and CacheGen's profile for what they keep. Neither changes the model's fingerprint.

The prompts: for the demo model conversations about training facts, so that no held-out world is among them; for any
other the text of ``--text``, or without it the licences and readmes of the installed packages.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import Progress

from configs.model_folder import find_model
from deployments.segment_store.codec_files import model_digest
from deployments.segment_store.sparse.budget_files import KEPT_PROFILE_FILE, write_budgets
from kernels.codecs.profile import LEVELS, CodecProfile
from kvmanager.extensions.sparse.budgets import Budgets
from load_tests.codec.model import kv_shape, load_model
from load_tests.codec.profile import PROFILE_SEED, demo_samples, installed_text, text_samples
from load_tests.codec.profile import PROMPTS as PROFILE_PROMPTS
from load_tests.codec.profile_measure import (
    BITS,
    PROBES,
    Probe,
    Sample,
    assemble,
    distributions,
    layer_groups,
    level_factors,
    sensitivities,
)
from load_tests.codec.questions import DEMO, MEASURED_KINDS, Conversation, conversations
from load_tests.measuring.program import InputError, JsonFile, one_sentence, out, writable
from load_tests.measuring.report import write_json
from load_tests.sparse.calibrate import MOST_KL, calibrate
from load_tests.sparse.judge import cost_of, hold
from load_tests.sparse.masked_model import MaskedModel

PROMPTS, PROBED = 33, 24
"""Prompts that budgets are judged on; the codec's profile is measured on as many as one for dense KV."""
QUICK_PROMPTS, QUICK_PROBED = 3, 1


def kept_profile(
    model: Any, samples: Sequence[Sample], probed: int, name: bytes, budgets: Budgets, tick: Callable[[], None]
) -> CodecProfile:
    """CacheGen's profile for what budgets keep: a level's bits are spent on the elements that are stored at all.

    A profile for dense KV spends most bits on the layers that lose most by coarse steps. Just these layers are kept
    whole, so on sparse KV it takes more per element than its level says. Measured as
    `load_tests.codec.profile.make_profile` does; `name` is the model's digest.
    """
    _, *heads = kv_shape(model)
    found = distributions(model, samples, tick)
    sensitivity = sensitivities(Probe(model, samples[:probed], found), found, tick)
    kept = [float(share) for share in budgets.shares]
    chosen = {level: level_factors(found, sensitivity, BITS[level], kept) for level in LEVELS}
    return assemble(found, chosen, name, (heads[0], heads[1]))


def main(
    model: Annotated[str, typer.Option(help="A folder in Hugging Face's format.")] = "models/demo",
    text: Annotated[Path | None, typer.Option(help="A text for the prompts.", exists=True, dir_okay=False)] = None,
    output: Annotated[
        Path | None, typer.Option("--out", help="Folder to write to; the model's own by default.")
    ] = None,
    prompts: Annotated[int, typer.Option(min=2, help="How many prompts to read.")] = PROMPTS,
    seed: Annotated[int, typer.Option(help="Of the choice of conversations, or of readmes.")] = PROFILE_SEED,
    most_kl: Annotated[float, typer.Option(min=0.0, help="Nats that all layers together may cost.")] = MOST_KL,
    quick: Annotated[bool, typer.Option("--quick", help="Rough budgets from few prompts.")] = False,
    json_file: JsonFile = None,
) -> None:
    """Measure, write budgets and profile, and say what they keep."""
    torch.manual_seed(0)
    with one_sentence(ValueError):
        folder = find_model(model)
        if isinstance(folder, str):
            raise InputError(f"Budgets are measured on a folder of weights; download {model} and give its folder.")
        target = writable(output or folder, "--out")
        count, sampled, probed = prompts, PROFILE_PROMPTS, PROBED
        if quick:
            count, sampled, probed = QUICK_PROMPTS, QUICK_PROMPTS, QUICK_PROBED
        masked = MaskedModel(load_model(folder))
        layers = kv_shape(masked.model)[0]
        if folder == DEMO and text is None:
            source = "conversations about the demo model's worlds"
            asked: Sequence[Conversation | Sample] = list(
                conversations(count * len(MEASURED_KINDS), seed, heldout=False)
            )
            samples = demo_samples(sampled, seed)
        else:
            source = str(text) if text else "licences and readmes of the installed packages"
            words = text.read_text(encoding="utf-8") if text else installed_text(seed)
            asked, samples = (text_samples(str(folder), words, number) for number in (count, sampled))
        with Progress(console=out) as progress:
            total = 2 * layers + 2 * len(samples) + 2 * len(PROBES) * len(layer_groups(layers))
            task = progress.add_task(f"{len(asked)} prompts", total=total)

            def tick() -> None:
                progress.advance(task)

            held = hold(masked, asked)
            found = calibrate(layers, lambda budgets: cost_of(masked, held, budgets), most_kl, tick)
            profile = kept_profile(
                masked.model, samples, min(probed, sampled), model_digest(str(folder)), found.budgets, tick
            )
    alone = [{"layer": layer} | cost.as_row() for layer, cost in enumerate(found.alone)]
    measured = found.cost.as_row() | {"prompts": len(asked), "source": source, "seed": seed, "most_kl": most_kl}
    path = write_budgets(target, found.budgets, measured, folder)
    (target / KEPT_PROFILE_FILE).write_bytes(profile.to_bytes())
    shares = " ".join(str(int(8 * share)) for share in found.budgets.shares)
    out.print(
        f"{path}: {shares} eighths by layer keep {found.cost.kept:.1%} with KL {found.cost.kl:.5f}; "
        f"{found.cost.lost} answers lost and {found.cost.gained} gained of {found.cost.questions}",
        markup=False,
    )
    write_json({"file": str(path), "alone": alone, "measured": measured, "eighths": shares}, json_file)


if __name__ == "__main__":
    typer.run(main)
