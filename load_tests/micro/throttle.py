"""Does the time to the first token follow the better of loading and recomputing? `python -m load_tests.micro.throttle`

A prompt whose KV lies in Redis is served again and again over an emulated link that becomes slower step by step. Three
arms take turns in each round: always load, always recompute, and `auto` (`kv.load_or_recompute`), which starts every
step with what it learned in the one before, and learns only from its own prompts. The first rounds of a step are where
it finds out; they are shown beside the others. A step has held when auto's median is at most 1.10 times the better of
the other two. Real vLLM, manager, Redis and tiers; no HTTP (`load_tests.micro.throttled_engine`).
"""

from __future__ import annotations

import asyncio
import json
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import Progress

from load_tests.harness.engine_threads import start_with_engine_threads
from load_tests.micro.prefetch_chain import running
from load_tests.micro.throttled_engine import ARMS, Served, ThrottledEngine, prompt, write_random_model

out = Console(stderr=True, highlight=False)
STEPS = "4000,1000,300,100,50,20,10,5,2,1"
TARGET = 1.10


async def measure(
    engine: ThrottledEngine, steps: Sequence[float], tokens: int, rounds: int, learning: int, warm_up: int
) -> list[dict[str, Any]]:
    """All steps."""
    rows = []
    with Progress(console=out, transient=True) as progress:
        bar = progress.add_task("prompts", total=warm_up + len(steps) * (learning + rounds) * len(ARMS))
        lengths = [tokens * (1 + number % 4) // 4 for number in range(warm_up)]
        for number, length in enumerate(lengths):
            words = prompt(1 + number, length)
            await engine.store(words)
            for arm in ARMS:
                await engine.serve(arm, words)
            progress.advance(bar)
        words = prompt(0, tokens)
        await engine.store(words)
        for bytes_per_s in steps:
            engine.link.throttle(bytes_per_s)
            served: dict[str, list[Served]] = {arm: [] for arm in ARMS}
            for number in range(learning + rounds):
                shift = number % len(ARMS)
                for arm in ARMS[shift:] + ARMS[:shift]:
                    served[arm].append(await engine.serve(arm, words))
                    progress.advance(bar)
            rows.append({"bytes_per_s": bytes_per_s, **summary(served, learning)})
    return rows


def summary(served: dict[str, list[Served]], learning: int) -> dict[str, Any]:
    """One step."""
    after = {arm: spread([one.ttft_s for one in found[learning:]]) for arm, found in served.items()}
    while_learning = [one.ttft_s for one in served["auto"][:learning]]
    ratio = after["auto"][1] / min(after["load"][1], after["recompute"][1])
    reasons = [one.reason for one in served["auto"][learning:]]
    return {
        "ttft_s": after,
        "ratio": ratio,
        "learning_auto_s": while_learning,
        "reasons": {reason: reasons.count(reason) for reason in sorted(set(reasons))},
        "prompts": {arm: [asdict(one) for one in found] for arm, found in served.items()},
    }


def spread(values: Sequence[float]) -> list[float]:
    """Least, median, most."""
    return [min(values), statistics.median(values), max(values)]


def table(rows: Sequence[dict[str, Any]], tokens: int, rounds: int, learning: int) -> str:
    """Markdown."""
    lines = [
        f"{tokens} tokens; {rounds} rounds after {learning} to learn; TTFT in ms, min / median / max.",
        "",
        "| link, MB/s | always load | always recompute | auto | auto / the better | why | while learning, auto |",
        "|---:|---|---|---|---:|---|---|",
    ]
    for row in rows:
        times = [" / ".join(f"{1e3 * value:.0f}" for value in row["ttft_s"][arm]) for arm in ARMS]
        reasons = ", ".join(f"{reason} {count}" for reason, count in row["reasons"].items())
        learning_ms = ", ".join(f"{1e3 * value:.0f}" for value in row["learning_auto_s"])
        lines.append(
            f"| {row['bytes_per_s'] / 1e6:g} | {' | '.join(times)} | {row['ratio']:.2f} | {reasons} | {learning_ms} |"
        )
    worst = max(row["ratio"] for row in rows)
    verdict = "held" if worst <= TARGET else "not held"
    return "\n".join([*lines, "", f"Worst ratio {worst:.2f}; target {TARGET:.2f}: {verdict}."])


def plot(rows: Sequence[dict[str, Any]], path: str) -> None:
    """TTFT by the link's rate: medians, and bars from the least to the most."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5))
    rates = [row["bytes_per_s"] / 1e6 for row in rows]
    for arm, style in zip(ARMS, ("o--", "s--", "D-"), strict=True):
        least, median, most = zip(*(row["ttft_s"][arm] for row in rows), strict=True)
        bars = [
            [m - low for m, low in zip(median, least, strict=True)],
            [high - m for m, high in zip(median, most, strict=True)],
        ]
        axes.errorbar(rates, median, yerr=bars, fmt=style, capsize=3, label=arm if arm == "auto" else f"always {arm}")
    axes.set(xscale="log", yscale="log", xlabel="Redis link, MB/s", ylabel="time to first token, s")
    axes.invert_xaxis()
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


def main(
    rounds: Annotated[int, typer.Option(min=1, help="Counted rounds of each step.")] = 11,
    learning: Annotated[int, typer.Option(min=0, help="Rounds before, at each step.")] = 5,
    warm_up: Annotated[
        int, typer.Option(min=4, help="Stored prompts of different lengths that each arm serves before the first step.")
    ] = 8,
    tokens: Annotated[int, typer.Option(min=256, help="Tokens of the prompt.")] = 2048,
    steps: Annotated[str, typer.Option(help="Megabytes per second, in this order.")] = STEPS,
    model: Annotated[
        str | None, typer.Option(help="A model folder. Default: a random Qwen2 of 45M parameters.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="`float32` where the CPU has no fast bfloat16 (no AVX-512).")] = "auto",
    json_file: Annotated[str | None, typer.Option("--json", help="A file, or - for stdout.")] = None,
    plot_file: Annotated[str | None, typer.Option("--plot", help="A PNG file.")] = None,
) -> None:
    """Measure, and print a Markdown table; exit code 1 when the target is missed."""
    rates = [1e6 * float(step) for step in steps.split(",")]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        chosen = model or write_random_model(folder / "random-qwen2")
        with running() as server:
            engine = ThrottledEngine(server, chosen, folder, device_blocks=4 * tokens // 32, dtype=dtype)

            async def run() -> list[dict[str, Any]]:
                return await measure(engine, rates, tokens, rounds, learning, warm_up)

            try:
                rows = asyncio.run(run())
            finally:
                engine.close()
    if json_file != "-":
        print(table(rows, tokens, rounds, learning))
    made = {"tokens": tokens, "dtype": dtype, "rounds": rounds, "learning": learning, "steps": rows}
    report = json.dumps(made, indent=2)
    if json_file == "-":
        print(report)
    elif json_file:
        Path(json_file).write_text(report)
    if plot_file:
        plot(rows, plot_file)
    if max(row["ratio"] for row in rows) > TARGET:
        raise typer.Exit(1)


if __name__ == "__main__":
    start_with_engine_threads("load_tests.micro.throttle")
    typer.run(main)
