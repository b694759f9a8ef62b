"""Makes plans: what one replica may load for one prompt, under a lease (`kvmanager.moves.leases`).

A plan is about the prompt's own chain of segments; extensions may add to it (`kvmanager.moves.plan_draft`). All of it
is under one lease. One thread.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvmanager.index.catalog import Catalog
from kvmanager.index.counters import Counters
from kvmanager.index.nodes import Copy
from kvmanager.moves.chain_search import ChainSearch, FoundChain
from kvmanager.moves.leases import Leases
from kvmanager.moves.plan import Plan, PlannedLoad, PlanQuery, PlanReason
from kvmanager.moves.plan_draft import (
    AllStored,
    DraftParts,
    PlanChoice,
    PlanDraft,
    PlanExtension,
    PlanReader,
    loads_of,
    scored,
)
from kvmanager.moves.renewals import Renewals
from kvmanager.segments.keys import BlockHash


class PlanBooks(NamedTuple):
    """What a plan is entered in."""

    counters: Counters
    renewals: Renewals
    leases: Leases


class PlanShape(NamedTuple):
    """The size by which a manager plans, and its number."""

    block_tokens: int
    epoch: int


class Planner:
    """Makes plans."""

    def __init__(
        self,
        catalog: Catalog,
        search: ChainSearch,
        books: PlanBooks,
        shape: PlanShape,
        extensions: Sequence[PlanExtension] = (),
    ) -> None:
        """``extensions``: in the order in which they are asked."""
        self._catalog, self._search = catalog, search
        self._counters, self._leases = books.counters, books.leases
        self._parts = DraftParts(catalog, search, books.counters, books.renewals, shape.block_tokens)
        self._epoch = shape.epoch
        self._extensions = extensions

    def plan(self, now: float, replica: str, node: str, query: PlanQuery, choice: PlanChoice | None = None) -> Plan:
        """Count one use of every known node that this prompt finds, and lease what is to be loaded of it.

        That is all that is stored unless ``choice`` says less, and what extensions add. O(segments of the prompt and of
        what its query asks for), plus O(log n) for the heap entries of leaves.
        """
        draft = PlanDraft(self._parts, PlanReader(node, now), query, choice or AllStored())
        asked = [found for each in self._extensions if (found := each.asked(query))] if query.extras else ()
        if asked:
            draft.uses_once()
        for extension in asked:
            extension.find(draft)
        scores = draft.use(draft.found)
        draft.segments, draft.copies, draft.reason = self._choose(
            draft.found, draft.hashes, draft.device_blocks, draft.choice
        )
        for extension in asked:
            extension.extend(draft)
        self._count(draft)
        lease_id = self._leases.begin(now, replica, draft.copies)
        loads, expected = () if draft.apart else tuple(draft.segments), draft.choice.expectation()
        clock = self._catalog.clock.now
        return Plan(lease_id, loads, draft.reason, scores, clock, self._epoch, expected, draft.extras)

    def reserve(self, now: float, replica: str, node: str, hashes: Sequence[BlockHash]) -> Plan:
        """Lease what a directive will load of a prompt: as `plan`, but count nothing, for no request asked."""
        found = self._search.find(hashes, node)
        segments, copies, reason = self._choose(found, hashes, 0, AllStored())
        scores = scored(found, lambda known: known.score)
        lease_id = self._leases.begin(now, replica, copies)
        return Plan(lease_id, tuple(segments), reason, scores, self._catalog.clock.now, self._epoch)

    def _choose(
        self, found: FoundChain, hashes: Sequence[BlockHash], device_blocks: int, choice: PlanChoice
    ) -> tuple[list[PlannedLoad], list[Copy], PlanReason]:
        """Return which of the stored segments are loaded, as ``choice`` says, their copies, and why."""
        segments, copies = loads_of(found, hashes, device_blocks)
        if not segments:
            nothing = PlanReason.EVICTED if found.path else PlanReason.COLD
            return [], [], PlanReason.DEVICE if found.copies else nothing
        count, reason = choice.choose(segments)
        return segments[:count], copies[:count], reason

    def _count(self, draft: PlanDraft) -> None:
        counters = self._counters
        counters.plans += 1
        counters.prompt_blocks += len(draft.hashes)
        counters.device_blocks += draft.device_blocks
        draft.count_reused(draft.segments, draft.device_blocks)
