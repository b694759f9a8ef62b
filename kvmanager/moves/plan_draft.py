"""A plan in the making, and the interfaces of what chooses for it and of what adds to it.

A plan is about the prompt's own chain of segments. An extension (`kvmanager.extensions`) brings KV that this chain does
not have, for prompts whose query asks for that by the extension's name. It may replace what was found before any use of
it is counted (`PromptExtension.find`), and once the own chain's part is chosen (`PromptExtension.extend`) it may add to
`Plan.extras`, take over the segments of the chain, and have more copies leased. Extensions are asked in one order, each
after what the ones before it have done. Without one the plan is complete. One thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from kvmanager.index.catalog import Catalog
from kvmanager.index.counters import Counters
from kvmanager.index.locations import Tier
from kvmanager.index.nodes import Copy, Node
from kvmanager.moves.chain_search import ChainSearch, FoundChain
from kvmanager.moves.plan import NOTHING_EXPECTED, PlanExpectation, PlannedLoad, PlanQuery, PlanReason
from kvmanager.moves.renewals import Renewals
from kvmanager.segments.keys import BlockHash, SegmentKey


class PlanChoice(Protocol):
    """Decides for one prompt how much of what is stored is loaded (`kvmanager.loading.load_choice` does by rates).

    Each method is called once, in this order.
    """

    device_tokens: int
    """Leading tokens that the device holds now."""

    def choose(self, segments: Sequence[PlannedLoad]) -> tuple[int, PlanReason]:
        """Return how many of the stored segments that begin a prompt to load, from the first on, and why."""
        ...

    def expectation(self) -> PlanExpectation:
        """Return what is expected of the prompt with what was chosen."""
        ...


class AllStored:
    """The choice of all that is stored."""

    device_tokens = 0

    def choose(self, segments: Sequence[PlannedLoad]) -> tuple[int, PlanReason]:
        """Return all."""
        return len(segments), PlanReason.HIT

    def expectation(self) -> PlanExpectation:
        """Return that nothing is known."""
        return NOTHING_EXPECTED


class PlanReader(NamedTuple):
    """The node that asks, and when."""

    node: str
    now: float


class DraftParts(NamedTuple):
    """What plans are made with."""

    catalog: Catalog
    search: ChainSearch
    counters: Counters
    renewals: Renewals
    block_tokens: int


class PlanDraft:
    """One prompt's plan in the making. All that it leases is under one lease."""

    __slots__ = (
        "_catalog",
        "_renewals",
        "_used",
        "apart",
        "block_tokens",
        "choice",
        "copies",
        "counters",
        "device_blocks",
        "extras",
        "found",
        "hashes",
        "query",
        "reader",
        "reason",
        "search",
        "segments",
    )

    def __init__(self, parts: DraftParts, reader: PlanReader, query: PlanQuery, choice: PlanChoice) -> None:
        self._catalog, self.search, self.counters, self._renewals, self.block_tokens = parts
        self.reader, self.query, self.choice = reader, query, choice
        self.hashes = self.search.further_stored(query.hashes, query.exact_hashes)
        """The names of the prompt that the plan is about."""
        self.device_blocks = query.device_blocks
        self.found = self.search.find(self.hashes, reader.node)
        """What is known of the prompt's own chain."""
        self.segments: list[PlannedLoad] = []
        """What is chosen of it."""
        self.apart = False
        """Whether an extra brings `segments`: the plan itself has none then."""
        self.copies: list[Copy] = []
        """To be leased."""
        self.reason: str = PlanReason.COLD
        self.extras: dict[str, Any] = {}
        self._used: set[Node] | None = None

    @property
    def reached(self) -> int:
        """Leading blocks of the prompt that are brought, or stay on the device."""
        return max(self.device_blocks, self.segments[-1].end_block if self.segments else 0)

    def uses_once(self) -> None:
        """Count each node once from now on, however many chains meet it."""
        self._used = set()

    def use(self, found: FoundChain) -> tuple[tuple[int, float], ...]:
        """Count one use of what was found, the deepest first; return where each one's part ends, and its hotness."""
        scores = scored(found, self._catalog.use if self._used is None else self._use_once)
        self._renewals.used(self.reader.now, found.path[: len(found.copies)])
        return scores

    def bring(self, loads: Iterable[PlannedLoad], copies: Iterable[Copy], skipped_blocks: int = 0) -> None:
        """Lease copies of a chain that an extra brings, and count its blocks after the first ``skipped_blocks``."""
        self.copies = [*self.copies, *copies]
        self.count_reused(loads, skipped_blocks)

    def count_reused(self, segments: Iterable[PlannedLoad], reached: int) -> None:
        """Count the blocks that segments bring after ``reached`` of their chain, by tier."""
        counters = self.counters
        for segment in segments:
            brought = max(0, segment.end_block - reached)
            if segment.tier is Tier.CPU:
                counters.cpu_blocks += brought
            else:
                counters.redis_blocks += brought
            reached = max(reached, segment.end_block)

    def _use_once(self, node: Node) -> float:
        used = self._used
        if used is None or node in used:
            return node.score
        used.add(node)
        return self._catalog.use(node)


class PromptExtension:
    """What an extension does for one prompt. Each method is called once, in this order."""

    def find(self, draft: PlanDraft) -> None:
        """Replace what was found of the prompt's own chain, or its names, before a use of it is counted."""

    def extend(self, draft: PlanDraft) -> None:
        """Add to the plan what goes beyond the chosen part of the prompt's own chain."""


class PlanExtension(Protocol):
    """An extension of all plans."""

    def asked(self, query: PlanQuery) -> PromptExtension | None:
        """Return what is to be done for a prompt; None where its query does not ask."""
        ...


def scored(found: FoundChain, visit: Callable[[Node], float]) -> tuple[tuple[int, float], ...]:
    """Visit what was found, the deepest first; return where each one's part ends and what the visit says."""
    scores = [(end, visit(link)) for link, end in zip(reversed(found.path), reversed(found.ends), strict=True)]
    return tuple(reversed(scores))


def loads_of(
    found: FoundChain, hashes: Sequence[BlockHash], device_blocks: int = 0
) -> tuple[list[PlannedLoad], list[Copy]]:
    """Return the stored segments of a chain that end behind ``device_blocks``, to be loaded, and their copies."""
    path, ends, copies = found
    first = sum(end <= device_blocks for end in ends[: len(copies)]) if device_blocks else 0
    segments = [
        PlannedLoad(
            link.key, link.start_block, link.num_blocks, *copy.partition.store.location, copy.nbytes, link.nbytes
        )
        for link, copy in zip(path[first:], copies[first:], strict=False)
    ]
    for number, segment in enumerate(segments):
        used_blocks = ends[first + number] - segment.start_block
        last_hash = hashes[ends[first + number] - 1]
        if SegmentKey(last_hash) != segment.key:  # of a whole one if another sequence has its marks: it is refused
            segments[number] = segment._replace(used_blocks=used_blocks, last_hash=last_hash)
    return segments, copies[first:]
