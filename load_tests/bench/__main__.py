"""`make bench`: crosskv compared with plain vLLM on Ray Serve and with Ray Serve LLM, on this machine.

Every measurement is written down when it ends: the same command goes on where an interrupted run stopped. Exit codes:
0 measured, 2 something is missing or wrong (one sentence says what), 130 interrupted.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from app.launch.descendants import become_subreaper
from configs.model_folder import PROJECT_ROOT
from configs.settings import SettingsError
from load_tests.bench.arms import ARMS
from load_tests.bench.choice import FULL, QUICK, Choice, default_dtype
from load_tests.bench.measure import Watch, measure, requests_to_come
from load_tests.bench.plan import Key, Lengths, Plan, Sizes
from load_tests.bench.report import PLACE, as_json, closing, draw, markdown, setting_of
from load_tests.bench.summary import rows, verdicts
from load_tests.harness.client import ServerError
from load_tests.harness.models import SHAPES, ModelError
from load_tests.measuring.journal import Journal
from load_tests.measuring.program import (
    EXIT_STOPPED,
    conclude,
    one_sentence,
    out,
    progress_bar,
    stop_by_signal,
    writable,
)
from load_tests.peers.engine import Dtype
from load_tests.peers.serving import require_free
from load_tests.workloads import WORKLOADS

RESULTS = PROJECT_ROOT / "load_tests" / "results"


def main(
    models: Annotated[str | None, typer.Option(help=f"With commas between them: {', '.join(SHAPES)}.")] = None,
    arms: Annotated[str | None, typer.Option(help=f"Default: all that run here of {', '.join(ARMS)}.")] = None,
    workloads: Annotated[str | None, typer.Option(help=f"Of {', '.join(WORKLOADS)}.")] = None,
    working_sets: Annotated[str | None, typer.Option(help="Over the device pools, such as 0.5,1.5,3.")] = None,
    alternations: Annotated[int | None, typer.Option(min=1, help="How often each arm has its turn.")] = None,
    replicas: Annotated[int, typer.Option(min=1)] = 2,
    device_blocks: Annotated[int | None, typer.Option(min=2, help="KV blocks per replica.")] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Default: as `dtype: auto` has it.")] = None,
    requests_per_s: Annotated[
        float | None,
        typer.Option(
            min=0.001,
            help="Where requests come by time. Default: by the model's size, and multi-round QA is a closed loop.",
        ),
    ] = None,
    lengths: Annotated[Lengths, typer.Option(help="Of documents and questions in long-document QA.")] = "random",
    seed: Annotated[int, typer.Option(help="Of the texts.")] = 0,
    quick: Annotated[bool, typer.Option("--quick", help="A small model, small pools, once: some minutes.")] = False,
    fresh: Annotated[bool, typer.Option("--fresh", help="Measure again what earlier runs have measured.")] = False,
    port: Annotated[int | None, typer.Option(help="For the servers. Default: a free one.")] = None,
    start_s: Annotated[float, typer.Option(min=1, help="Longest start of a server, in seconds.")] = 600.0,
    results: Annotated[Path, typer.Option(help="Folder of what is written.")] = RESULTS,
    docs: Annotated[bool, typer.Option("--write-docs", help="Put the tables into benchmarks.md.")] = False,
    json_file: Annotated[str | None, typer.Option("--json", help="Where else to write the JSON; - for stdout.")] = None,
) -> None:
    """Measure what is missing, and write the tables, the JSON and the pictures."""
    with one_sentence(ModelError, ServerError, SettingsError, ValueError):
        default = QUICK if quick else FULL
        blocks = device_blocks or default.device_blocks
        sizes = Sizes(replicas, blocks, dtype or default_dtype(), requests_per_s, seed, lengths)
        choice = Choice.made(default, sizes, models, arms, workloads, working_sets, alternations)
        for name, reason in choice.skipped.items():
            out.print(f"Not run: {ARMS[name].title} ({reason}).")
        keys = choice.plan.keys()
        journal: Journal[Key] = Journal(
            writable(results, "--results") / f"{choice.name}-{choice.plan.sizes.digest()}.jsonl"
        )
        if fresh:
            journal.forget(keys)
        if port is not None:
            require_free(port)
        try:
            _measure(choice.plan, journal, results, port, start_s)
        except KeyboardInterrupt:
            kept = len(journal.of(keys))
            out.print(f"Interrupted: {kept} of {len(keys)} kept; the same command goes on.")
            raise typer.Exit(EXIT_STOPPED) from None
    _report(choice, journal, results, json_file, docs)


def _measure(plan: Plan, journal: Journal[Key], results: Path, port: int | None, start_s: float) -> None:
    kept, all_of_them = len(journal.of(plan.keys())), len(plan.keys())
    if kept:
        out.print(f"{kept} of {all_of_them} were measured before ({journal.path}); --fresh measures them again.")
    stop_by_signal()  # the server that runs is ended too
    become_subreaper()  # what a server leaves behind is found, and ended, here
    with progress_bar("requests") as progress:
        bar = progress.add_task("making the models and the texts", total=None)
        progress.update(bar, total=requests_to_come(plan, journal))
        watch = Watch(
            now=lambda text: progress.update(bar, description=text),
            done=lambda _: progress.advance(bar),
            measured=lambda text: out.print(text, markup=False),
        )
        measure(plan, journal, writable(results / "logs", "--results"), port, start_s, watch)


def _report(choice: Choice, journal: Journal[Key], results: Path, json_file: str | None, docs: bool) -> None:
    keys = choice.plan.keys()
    entries = dict(zip(keys, journal.of(keys), strict=True))
    found = rows(
        {key: entry["figures"] for key, entry in entries.items()},
        {key: entry["requests"] for key, entry in entries.items()},
    )
    judged = verdicts(found)
    setting = setting_of(choice.plan)
    page = markdown(found, judged, choice.skipped, setting)
    document = as_json(choice.plan, found, judged, choice.skipped, setting)
    (results / f"{choice.name}.md").write_text(page, encoding="utf-8")
    (results / f"{choice.name}.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    pictures = draw(found, results, choice.name)
    conclude(page, document, json_file, block=PLACE if docs else None)
    out.print(f"{closing(judged)} {results / choice.name}.md, .json and {len(pictures)} pictures hold it all.")


if __name__ == "__main__":
    typer.run(main)
