"""CacheGen's streaming adaptation (`kvmanager.streaming_choice`) on simulated links that drop, against fixed forms.

`python -m load_tests.micro.streaming_links` prints the table in docs/concepts/compression.md.
No clock: the links are functions of time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import inf
from statistics import mean

from kvmanager.streaming_choice import LOSSLESS, RECOMPUTE, Chunk, Stream

SIZES = {0: 700, 1: 250, 2: 160, 3: 110}
"""Bytes of a chunk by level: about what the levels make of bf16."""
CHUNKS = 12


def context(recompute_s: float, sizes: dict[int, int] = SIZES) -> list[Chunk]:
    """Later chunks take longer to compute, for they attend to more."""
    return [Chunk(sizes, recompute_s * (0.7 + 0.6 * number / CHUNKS)) for number in range(CHUNKS)]


@dataclass
class Link:
    """Bytes per second over time: `(until_s, rate)`, the last until infinity."""

    rates: Sequence[tuple[float, float]]

    def end(self, start_s: float, nbytes: float) -> float:
        """When a transfer that starts at `start_s` ends."""
        for until, rate in self.rates:
            if start_s >= until:
                continue
            if (until - start_s) * rate >= nbytes:
                return start_s + nbytes / rate
            nbytes -= (until - start_s) * rate
            start_s = until
        raise AssertionError("the link ends")


@dataclass
class Run:
    """One context over one link: when it was there, and in which forms."""

    end_s: float = 0.0
    forms: list[int] = field(default_factory=list)

    @property
    def loss(self) -> float:
        """Mean level, with what loses nothing as 0."""
        return mean(max(LOSSLESS, form) for form in self.forms)


def streamed(chunks: Sequence[Chunk], link: Link, stream: Stream) -> Run:
    """What `stream` makes of a link that it measures chunk by chunk."""
    run = Run()
    while (form := stream.next_form(run.end_s)) is not None:
        chunk = chunks[len(run.forms)]
        run.forms.append(form)
        if form == RECOMPUTE:
            run.end_s += chunk.recompute_s
            continue
        arrived_s = link.end(run.end_s, chunk.level_bytes[form])
        stream.arrived(chunk.level_bytes[form], arrived_s - run.end_s)
        run.end_s = arrived_s
    return run


def fixed(chunks: Sequence[Chunk], link: Link, form: int) -> Run:
    """An arm that takes one form whatever happens."""
    run = Run()
    for chunk in chunks:
        run.forms.append(form)
        run.end_s = run.end_s + chunk.recompute_s if form == RECOMPUTE else link.end(run.end_s, chunk.level_bytes[form])
    return run


def earliest_s(chunks: Sequence[Chunk], link: Link) -> float:
    """When the context could be there at the earliest, by somebody who knows what the link will do."""
    now = 0.0
    for chunk in chunks:
        now = min([now + chunk.recompute_s, *(link.end(now, size) for size in chunk.level_bytes.values())])
    return now


def drops() -> list[tuple[float, float, Link]]:
    """Targets, costs of computing a chunk, and links that fall to a tenth or to three tenths for some time."""
    grid = product((1.0, 2.0, 4.0), (0.1, 0.4, 2.0), (1200, 5000), (0.1, 0.5), (0.2, 1.0, 1e9), (0.1, 0.3))
    return [
        (target_s, recompute_s, Link([(start, rate), (start + length, rate * share), (inf, rate)]))
        for target_s, recompute_s, rate, start, length, share in grid
    ]


def over_drops(arm: Callable[[list[Chunk], Link, float], Run]) -> tuple[int, float]:
    """For how many of the links the target held, and the mean loss where it did."""
    losses = [
        run.loss
        for target_s, recompute_s, link in drops()
        if (run := arm(context(recompute_s), link, target_s)).end_s <= target_s
    ]
    return len(losses), mean(losses)


def adaptive(prepared_for: float) -> Callable[[list[Chunk], Link, float], Run]:
    """The arm that chooses; it knows what the link gave before."""
    return lambda chunks, link, target_s: streamed(
        chunks, link, Stream(chunks, target_s, link.rates[0][1], prepared_for)
    )


def always(form: int) -> Callable[[list[Chunk], Link, float], Run]:
    """An arm of one form."""
    return lambda chunks, link, target_s: fixed(chunks, link, form)


def main() -> None:
    """Print for how many of the links each arm holds the target, and its mean level there."""
    possible = sum(earliest_s(context(recompute_s), link) <= target_s for target_s, recompute_s, link in drops())
    print(f"{len(drops())} links, {possible} of which could be held by who knows them beforehand\n")
    arms = {
        "adaptive, the paper's rule (`prepared_for` 1)": adaptive(1.0),
        "adaptive, `prepared_for` 0.3": adaptive(0.3),
        "adaptive, `prepared_for` 0.1": adaptive(0.1),
        **{f"always level {level}": always(level) for level in (1, 2, 3)},
        "always without loss": always(LOSSLESS),
        "always recomputed": always(RECOMPUTE),
    }
    print("| arm | targets held | mean level where held |\n|---|---|---|")
    for name, arm in arms.items():
        held, loss = over_drops(arm)
        print(f"| {name} | {held} | {loss:.2f} |")


if __name__ == "__main__":
    main()
