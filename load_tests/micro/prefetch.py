"""How long a long prefix takes from Redis, by the number of prefetch workers: `python -m load_tests.micro.prefetch`.

A prefix of 4,000 tokens of a 0.5B model (24 layers, 2 KV heads of 64, bfloat16: 49 MB in 16 segments) lies in Redis. It
is loaded as a replica does it, on the real parts without an engine: CPU tier → prefetch workers → Redis, and back over
Ray's object store; each segment is verified by the worker and again here, and written into a paged KV cache, in order,
as it arrives. The clock runs from the reader's first call (the manager has planned) to the last byte in the cache.

Then the CPU tier is emptied, and the next arm has its turn: 1, 2, 4 workers, and as many as the pool chooses, each over
the link as it is and over an emulated one. A worker reads over one connection. The first rounds are not counted: caches
warm up, and the pool measures what one connection brings. Ratios are of one round's arms, one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer
from rich.progress import track

from load_tests.harness.emulated_link import NO_LINK, EmulatedLink
from load_tests.harness.tiers import running
from load_tests.measuring import report
from load_tests.measuring.command import JsonFile, Rounds, out
from load_tests.measuring.spread import Spread, ratios
from load_tests.measuring.turns import turns
from load_tests.micro.prefetch_chain import (
    BLOCKS,
    LAYERS,
    LAYOUT,
    SEGMENT_BLOCKS,
    TOKENS,
    Application,
    PagedCache,
    Timing,
)

WORKERS = (1, 2, 4)
CHOOSING = "chosen"
LINK = EmulatedLink(bytes_per_s=100e6, delay_s=0.0005)


@dataclass(slots=True)
class Arm:
    """A way to load, and what came of it. `workers` None: as many as the pool chooses."""

    link: EmulatedLink
    workers: int | None
    timings: list[Timing] = field(default_factory=list)

    @property
    def name(self) -> str:
        """For people."""
        return CHOOSING if self.workers is None else str(self.workers)


def measure(rounds: int, warm_up: int) -> tuple[list[Arm], dict[str, float]]:
    """All arms, one after the other in each round; and the seconds of each step of one segment."""
    arms = [Arm(link, workers) for link in (LINK, NO_LINK) for workers in (*WORKERS, None)]
    cache = PagedCache()
    with running() as server:
        applications = {link: Application(server, link, cache) for link in (LINK, NO_LINK)}
        for turn in track(list(turns(arms, rounds, warm_up)), "loads", console=out):
            timing = applications[turn.arm.link].load(turn.arm.workers)
            if turn.counts:
                turn.arm.timings.append(timing)
        steps = applications[NO_LINK].steps()
        for application in applications.values():
            application.close()
    return arms, steps


def summary(arm: Arm, one: Arm) -> dict[str, Any]:
    """An arm against the one with a single worker over the same link."""
    return {
        "link": str(arm.link) if arm.link else "none emulated",
        "workers": arm.name,
        "used": sorted({timing.workers for timing in arm.timings}),
        "asked_again": sum(timing.asked_again for timing in arm.timings),
        "first_segment_s": Spread.of([timing.first_s for timing in arm.timings]).as_list(),
        "all_s": Spread.of([timing.all_s for timing in arm.timings]).as_list(),
        "times_as_fast_as_one": Spread.of(
            ratios([timing.all_s for timing in one.timings], [timing.all_s for timing in arm.timings])
        ).as_list(),
    }


def table(rows: Sequence[dict[str, Any]], steps: dict[str, float], rounds: int) -> str:
    """Markdown."""
    megabytes = LAYERS * 2 * TOKENS * LAYOUT.num_kv_heads * LAYOUT.head_dim * 2 / 1e6
    title = (
        f"{TOKENS} tokens, {LAYERS} layers, {LAYOUT.num_kv_heads} KV heads of {LAYOUT.head_dim}, bfloat16: "
        f"{megabytes:.1f} MB in {-(-BLOCKS // SEGMENT_BLOCKS)} segments; {rounds} rounds; min / median / max. "
        f"The slow link is emulated in the workers: {LINK}."
    )
    body = [
        [
            row["link"],
            row["workers"],
            ", ".join(map(str, row["used"])),
            *(f"{Spread(*row[name]).slashed('.0f', 1e3)} ms" for name in ("first_segment_s", "all_s")),
            Spread(*row["times_as_fast_as_one"]).slashed(".2f"),
        ]
        for row in rows
    ]
    parts = [
        title,
        report.table(["link", "workers", "used", "first segment", "all", "times as fast as 1 worker"], body),
    ]
    if late := sum(row["asked_again"] for row in rows):
        parts.append(f"In {late} loads a worker was late, and others were asked too: the machine was not idle.")
    each = ", ".join(f"{name} {1000 * seconds:.1f} ms" for name, seconds in steps.items())
    return "\n\n".join([*parts, f"One whole segment (3.1 MB), each step alone: {each}."])


def main(
    rounds: Rounds = 12,
    warm_up: Annotated[int, typer.Option(min=0, help="Rounds before, in which caches warm up.")] = 3,
    json_file: JsonFile = None,
) -> None:
    """Measure, and print a Markdown table."""
    arms, steps = measure(rounds, warm_up)
    rows = [summary(arm, next(one for one in arms if one.link == arm.link and one.workers == 1)) for arm in arms]
    report.deliver(table(rows, steps, rounds), {"rounds": rounds, "steps_s": steps, "arms": rows}, json_file)


if __name__ == "__main__":
    typer.run(main)
