"""Where the time of a blend goes: `python -m load_tests.micro.blend.waterfall`

One engine in this process, and chunks in a port in memory: without HTTP, manager and tiers. In each round the documents
are new; a full prefill of them and a blend for each check layer take turns, each with the documents in another order
behind another beginning. What of a blend's time to the first token no part has is called the rest: scheduling, the
question's own prefill, the first token.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Annotated, Any

import typer

from configs.blend_section import DEFAULT_RECOMPUTE_RATIO
from configs.settings import load_settings
from load_tests.bench.choice import default_dtype
from load_tests.harness.engine import Engine, greedy, prompt, start_with_engine_threads, timed
from load_tests.harness.memory_port import MemoryPort
from load_tests.harness.models import SHAPES, model_folder
from load_tests.measuring import plots
from load_tests.measuring.processes import machine_line
from load_tests.measuring.program import EXIT_INPUT, JsonFile, PlotFile, Rounds, chosen, one_sentence, out, progress_bar
from load_tests.measuring.report import deliver, table, wrapped, write_between
from load_tests.measuring.spread import Spread, ratios
from load_tests.measuring.turns import rotated
from load_tests.micro.blend.prompts import CHUNKS, DOCUMENT_TOKENS, QUESTION_TOKENS, SYSTEM_TOKENS
from load_tests.micro.blend.report import PAGE

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FULL = "full prefill"
REST = "rest"
PARTS: Mapping[str, str] = {
    "prefix_wait_s": "wait for its own prefix",
    "embed_s": "embeddings",
    "full_s": "layers before the check layer",
    "fetch_wait_s": "wait for chunks",
    "select_s": "check layer, choice",
    "write_s": "stored KV moved, written",
    "selective_s": "other layers, chosen rows",
}
"""Of `deployments.engine.load_paths.blending.job.BlendParts`."""
BEGIN, END = (
    "<!-- parts: written by python -m load_tests.micro.blend.waterfall --write-docs -->",
    "<!-- end of parts -->",
)
PICTURE = "blend-parts.png"
"""In the page's folder."""
MAX_MODEL_LEN = 4_864
PROMPTS = 3
"""That the device has room for: of one round."""


@dataclass
class Waterfall:
    """One arm's rounds: seconds to the first token, and by title those of each part, `REST` among them."""

    ttft_s: list[float] = field(default_factory=list)
    parts: dict[str, list[float]] = field(default_factory=dict)

    def add(self, ttft_s: float, parts: Mapping[str, float]) -> None:
        """A round; `parts` by the names of `PARTS`, empty for a prefill."""
        self.ttft_s.append(ttft_s)
        named = {title: parts[name] for name, title in PARTS.items()} if parts else {}
        for title, seconds in {**named, REST: max(0.0, ttft_s - sum(named.values()))}.items():
            self.parts.setdefault(title, []).append(seconds)


def waterfall_table(found: Mapping[str, Waterfall]) -> str:
    """Milliseconds of each part, by arm: least / median / most; last the whole, and its ratio to a full prefill."""
    titles = [*PARTS.values(), REST]
    lines = [
        [
            title,
            *(Spread.of(one.parts[title]).slashed(".0f", 1e3) if title in one.parts else "" for one in found.values()),
        ]
        for title in titles
    ]
    whole = [Spread.of(one.ttft_s).slashed(".0f", 1e3, bold=True) for one in found.values()]
    full = found[FULL].ttft_s
    shares = [Spread.of(ratios(one.ttft_s, full)).slashed(".3f", bold=True) for one in found.values()]
    return table(["ms", *found], [*lines, ["first token", *whole], ["÷ full prefill", *shares]])


def draw(found: Mapping[str, Waterfall], figure: Figure) -> None:
    """A bar for each arm, part by part from left to right; medians."""
    axes = figure.subplots()
    arms = list(found)[::-1]
    left = [0.0] * len(arms)
    for title in (*PARTS.values(), REST):
        widths = [1e3 * Spread.of(found[arm].parts.get(title, [0.0])).median for arm in arms]
        axes.barh(range(len(arms)), widths, left=left, label=title, height=0.6)
        left = [before + width for before, width in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(arms)), arms)
    axes.set_xlabel("ms to the first token")
    axes.grid(axis="x", alpha=0.3)
    axes.legend(ncols=4, fontsize="x-small", loc="lower center", bbox_to_anchor=(0.5, 1.02))


class Prompts:
    """Token ids: documents of random lengths, and prompts of them with the places of their documents."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def drawn(self, lengths: tuple[int, int]) -> list[int]:
        """New tokens."""
        return prompt(self._rng.getrandbits(32), self._rng.randint(*lengths))

    def prompt(self, documents: Sequence[list[int]]) -> tuple[list[int], list[range]]:
        """All documents in a random order, between a beginning and a question of its own."""
        tokens = self.drawn(SYSTEM_TOKENS)
        chunks = []
        for document in self._rng.sample(list(documents), len(documents)):
            chunks.append(range(len(tokens), len(tokens) + len(document)))
            tokens += document
        return tokens + self.drawn(QUESTION_TOKENS), chunks


async def measure(engine: Engine, ratio: float, layers: Sequence[int], rounds: int, seed: int) -> dict[str, Waterfall]:
    """By arm; a round before the first does not count. Raises RuntimeError where a blend was none."""
    prompts = Prompts(seed)
    arms: dict[str, int | None] = {FULL: None, **{f"check layer {layer}": layer for layer in layers}}
    found = {arm: Waterfall() for arm in arms}
    with progress_bar() as progress:
        bar = progress.add_task("prompts", total=(rounds + 1) * len(arms))
        for number in range(-1, rounds):
            engine.port.segments.clear()
            documents = [prompts.drawn(DOCUMENT_TOKENS) for _ in range(CHUNKS)]
            for document in documents:
                await timed([engine.stream(document, greedy(1))], 1)
            engine.wait_for_saves()
            for arm in rotated(list(arms), max(0, number)):
                ttft_s, parts = await _one(engine, *prompts.prompt(documents), ratio, arms[arm])
                if number >= 0:
                    found[arm].add(ttft_s, parts)
                progress.advance(bar)
    return found


async def _one(
    engine: Engine, tokens: list[int], chunks: list[range], ratio: float, layer: int | None
) -> tuple[float, dict[str, float]]:
    if layer is None:
        full = await timed([engine.stream(tokens, greedy(1))], 1)
        engine.wait_for_saves()
        return full.ttft_s, {}
    counters = engine.reuse.paths["blend"].counters
    counters.last = None
    plan = engine.blend_plan(tokens, chunks, ratio, layer)
    one = await timed([engine.blended(tokens, greedy(1), plan)], 1)
    engine.wait_for_saves()
    if counters.last is None:
        raise RuntimeError(f"nothing was blended: {dict(counters.outcomes)}")
    return one.ttft_s, asdict(counters.last)


def main(
    rounds: Rounds = 6,
    model: Annotated[str, typer.Option(help=f"Of {', '.join(SHAPES)}.")] = "365m",
    check_layers: Annotated[str, typer.Option(help="With commas between them.")] = "1,2",
    ratio: Annotated[float, typer.Option(min=0, max=1)] = DEFAULT_RECOMPUTE_RATIO,
    seed: int = 0,
    docs: Annotated[
        bool, typer.Option("--write-docs", help="Put table and picture into docs/measured/blending.md.")
    ] = False,
    json_file: JsonFile = None,
    plot: PlotFile = None,
) -> None:
    """Measure, and print the parts."""
    with one_sentence():
        chosen("model", [model], SHAPES)
    settings = load_settings(
        {
            "model": str(model_folder(model)),
            "dtype": default_dtype(),
            "max_model_len": MAX_MODEL_LEN,
            "engine": {"device_blocks": PROMPTS * MAX_MODEL_LEN // 32},
        }
    )
    engine = Engine(settings, MemoryPort())
    try:
        found = asyncio.run(measure(engine, ratio, [int(word) for word in check_layers.split(",")], rounds, seed))
    except RuntimeError as error:
        out.print(str(error), markup=False)
        raise typer.Exit(EXIT_INPUT) from None
    finally:
        engine.close()
    shortest, longest = DOCUMENT_TOKENS
    setting = (
        f"*{model}, {default_dtype()}, {CHUNKS} documents of {shortest} to {longest} tokens, {100 * ratio:g} % "
        f"recomputed; {rounds} rounds; least / median / most. {machine_line()}.*"
    )
    document: dict[str, Any] = {"setting": setting, "arms": {arm: asdict(one) for arm, one in found.items()}}
    text = f"{wrapped(setting)}\n\n{waterfall_table(found)}"
    deliver(text, document, json_file)
    pictures = [path for path in (plot, PAGE.with_name(PICTURE) if docs else None) if path is not None]
    for path in pictures:
        figure = plots.new_figure(10.0, 3.2)
        draw(found, figure)
        plots.save(figure, path, dpi=110)
    if docs:
        write_between(PAGE, BEGIN, END, f"![Where a blend's time goes]({PICTURE})\n\n{text}")


if __name__ == "__main__":
    start_with_engine_threads("load_tests.micro.blend.waterfall")
    typer.run(main)
