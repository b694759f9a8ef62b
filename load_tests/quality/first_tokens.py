"""Times to the first token of what the table of quality compares: `python -m load_tests.quality.first_tokens`

One engine with a manager, a CPU tier and Redis below it, of a model whose prefill takes a while. In each round a new
prompt is computed, goes to Redis in one form after the other, and comes back from there; blended prompts have their
documents in host memory, as without loss a CPU tier has them. A ratio is to the prefill of the same round.
The result is kept in `load_tests/results/first_tokens.json`, which `make bench-quality` reads.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random
from typing import Annotated, Any

import typer

from configs.model_folder import PROJECT_ROOT
from load_tests.bench.choice import default_dtype
from load_tests.experiments.sizes import EngineSpec
from load_tests.harness.engine_process import EngineProcess
from load_tests.harness.models import SHAPES, ModelError, model_folder
from load_tests.measuring.processes import machine_line
from load_tests.measuring.program import JsonFile, chosen, one_sentence, out, progress_bar, stop_by_signal
from load_tests.measuring.report import deliver, table
from load_tests.measuring.spread import Spread
from load_tests.measuring.turns import rotated

FILE = PROJECT_ROOT / "load_tests" / "results" / "first_tokens.json"
STORED: Mapping[str, str] = {
    "exact, lossless": "lossless",
    "cachegen 1": "cachegen 1",
    "cachegen 2": "cachegen",
    "cachegen 3": "cachegen 3",
    "sparse 75": "sparse 75",
    "sparse 50": "sparse",
    "sparse 20": "sparse 20",
    "sparse 50, cachegen 2": "sparse + cachegen",
}
"""A row's name here and there: of `load_tests.experiments.engines.tiered.CODECS`."""
ALIKE: Mapping[str, str] = {"sparse layers": "sparse 50", "sparse layers, cachegen 2": "sparse 50, cachegen 2"}
"""A calibrated level cannot be had for random weights; it keeps about as much as this one. Said with a `~`."""
BLENDED = "blended"
LENGTHS = (2_600, 3_200)
LEAST_REUSED = 0.7


@dataclass
class FirstTokens:
    """Ratios by the name of a row, one a round, and what they were measured with."""

    setting: str
    ratios: dict[str, list[float]] = field(default_factory=dict)

    def words(self, row: str) -> str:
        """A cell: the median; about that of another level, after `~`; empty where nothing was measured."""
        name = BLENDED if row.startswith(f"{BLENDED}, check layer") else row
        if name in self.ratios:
            return f"{Spread.of(self.ratios[name]).median:.3f}"
        alike = ALIKE.get(name)
        return f"~ {Spread.of(self.ratios[alike]).median:.3f}" if alike in self.ratios else ""


def read_first_tokens(file: Path | None = None) -> FirstTokens | None:
    """What was measured last; None where nothing was. Raises ValueError for a file that is none of these."""
    path = file or FILE
    if file is None and not path.exists():
        return None
    try:
        return FirstTokens(**json.loads(path.read_text(encoding="utf-8")))
    except (OSError, TypeError) as error:
        raise ValueError(f"{path} is no result of load_tests.quality.first_tokens: {error}.") from None


def measured(engine: Any, rounds: int, seed: int, tick: Callable[[], object]) -> dict[str, list[float]]:
    """Ratios of every form, and of a blend; a round before the first does not count."""
    rng = Random(seed)
    found: dict[str, list[float]] = {name: [] for name in (*STORED, BLENDED)}
    for number in range(-1, rounds):
        tokens = rng.randint(*LENGTHS)
        for name in rotated(list(found), max(0, number)):
            ratio = _blend(engine, tokens) if name == BLENDED else _stored(engine, tokens, name)
            if number >= 0:
                found[name].append(ratio)
            tick()
    return found


def _stored(engine: Any, tokens: int, name: str) -> float:
    one = engine.call("round", tokens=tokens, max_tokens=1, codec=STORED[name])
    if one["redis"]["reused"] < LEAST_REUSED * tokens:
        raise ValueError(f"{name}: Redis gave {one['redis']['reused']} of {tokens} tokens, so nothing was measured.")
    return float(one["redis"]["ttft_s"] / one["none"]["ttft_s"])


def _blend(engine: Any, tokens: int) -> float:
    one = engine.call("blend", tokens=tokens)
    return float(one["blended"] / one["none"])


def main(
    rounds: Annotated[int, typer.Option(min=1, help="How often each way has its turn.")] = 3,
    model: Annotated[str, typer.Option(help=f"Of {', '.join(SHAPES)}.")] = "40m",
    seed: int = 0,
    output: Annotated[Path, typer.Option("--out", help="Where the result is kept.")] = FILE,
    json_file: JsonFile = None,
) -> None:
    """Measure, keep the result, and print it."""
    stop_by_signal()
    with one_sentence(ModelError, ValueError):
        chosen("model", [model], SHAPES)
        folder, dtype = str(model_folder(model)), default_dtype()
        with progress_bar("prompts") as progress, tempfile.TemporaryDirectory(prefix="crosskv-") as scratch:
            bar = progress.add_task(model, total=(rounds + 1) * (len(STORED) + 1))
            engine = EngineProcess(EngineSpec(model, dtype, tiered=True), folder, Path(scratch) / "engine.log")
            try:
                ratios = measured(engine, rounds, seed, lambda: progress.advance(bar))
            finally:
                engine.close()
    shortest, longest = LENGTHS
    setting = (
        f"{model}, {dtype}, prompts of {shortest:,} to {longest:,} tokens from Redis, blended ones from host memory. "
        f"Medians of {rounds} rounds, `python -m load_tests.quality.first_tokens`. {machine_line()}"
    )
    found = FirstTokens(setting, ratios)
    output.write_text(json.dumps(asdict(found), indent=2) + "\n", encoding="utf-8")
    out.print(f"{output} is written")
    lines = [[name, Spread.of(values).slashed(".3f", bold=True)] for name, values in ratios.items()]
    deliver(f"{setting}\n\n{table(['form', 'TTFT ÷ prefill'], lines)}", asdict(found), json_file)


if __name__ == "__main__":
    typer.run(main)
