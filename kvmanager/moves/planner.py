"""Makes plans: what one replica may load for one prompt, under a lease (`kvmanager.moves.leases`).

A plan is about the prompt's own chain of segments, and for a blended prompt about its chunks' chains too
(`kvmanager.moves.chunks`): what is loaded of its own chain is its prefix, and chunks serve what comes after that. All
of it is under one lease. One thread.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from kvmanager.index.catalog import Catalog
from kvmanager.index.counters import Counters
from kvmanager.index.locations import Tier
from kvmanager.index.nodes import Copy, CopyState, Node
from kvmanager.moves.chunks import BLEND, ChunkQuery, PlannedBlend, PlannedChunk, asked_blend
from kvmanager.moves.leases import Leases
from kvmanager.moves.plan import NOTHING_EXPECTED, Plan, PlanExpectation, PlannedLoad, PlanQuery, PlanReason
from kvmanager.moves.renewals import Renewals
from kvmanager.moves.retained_prefixes import SPARSE, asked_budgets, most_blocks, retained_prefix
from kvmanager.segments.budgets import Budgets
from kvmanager.segments.forms import serves
from kvmanager.segments.keys import BlockHash, SegmentKey
from kvmanager.segments.spans import join_marks


class PlanChoice(Protocol):
    """Decides for one prompt how much of what is stored is loaded. Each method is called once, in this order."""

    device_tokens: int
    """Leading tokens that the device holds now."""

    def choose(self, segments: Sequence[PlannedLoad]) -> tuple[int, PlanReason]:
        """Return how many of the stored segments that begin a prompt to load, from the first on, and why."""
        ...

    def choose_chunks(
        self, blocks: int, reason: PlanReason, chunks: Sequence[PlannedChunk]
    ) -> tuple[Sequence[PlannedChunk], PlanReason]:
        """Return which of the stored chunks to blend after ``blocks`` of the prompt's own, and why, or why none.

        ``reason`` is that of the prompt's own chain. Called only where chunks are stored.
        """
        ...

    def expectation(self) -> PlanExpectation:
        """Return what is expected of the prompt with what was chosen."""
        ...

    def blend_seconds(self) -> float:
        """Return how long the chosen blend should take; 0: not known."""
        ...


class AllStored:
    """The choice of all that is stored."""

    device_tokens = 0

    def choose(self, segments: Sequence[PlannedLoad]) -> tuple[int, PlanReason]:
        """Return all."""
        return len(segments), PlanReason.HIT

    def choose_chunks(
        self, blocks: int, reason: PlanReason, chunks: Sequence[PlannedChunk]
    ) -> tuple[Sequence[PlannedChunk], PlanReason]:
        """Return all."""
        return chunks, PlanReason.BLEND

    def expectation(self) -> PlanExpectation:
        """Return that nothing is known."""
        return NOTHING_EXPECTED

    def blend_seconds(self) -> float:
        """Return that it is not known."""
        return 0.0


@dataclass(frozen=True, slots=True)
class PlanShape:
    """Sizes by which a manager plans, and its number."""

    blocks_per_segment: int
    block_tokens: int
    epoch: int


class PlanBooks(NamedTuple):
    """What a plan is entered in."""

    counters: Counters
    renewals: Renewals
    leases: Leases


class _Reader(NamedTuple):
    """The node that asks, and when."""

    node: str
    now: float


class _Found(NamedTuple):
    """Known segments that hold a sequence's leading blocks, and where each one's part ends: first the stored ones."""

    path: list[Node]
    ends: list[int]
    copies: list[Copy]
    """Of the stored ones, those that are read fastest."""

    @property
    def stored_to(self) -> int:
        """How many leading blocks are stored."""
        return self.ends[len(self.copies) - 1] if self.copies else 0


class _Prefix(NamedTuple):
    """Leading blocks of a prompt that are stored as its own, loaded or not, and those that are loaded or here."""

    stored: int
    reached: int


class Planner:
    """Makes plans."""

    def __init__(self, catalog: Catalog, books: PlanBooks, shape: PlanShape) -> None:
        self._catalog = catalog
        self._counters, self._renewals, self._leases = books
        self._blocks_per_segment, self._block_tokens = shape.blocks_per_segment, shape.block_tokens
        self._epoch = shape.epoch

    def plan(self, now: float, replica: str, node: str, query: PlanQuery, choice: PlanChoice | None = None) -> Plan:
        """Count one use of every known node that this prompt finds, and lease what is to be loaded of it.

        That is all that is stored unless ``choice`` says less, and of the chunks that end after that prefix all that is
        stored behind it. Where more of the prompt is stored sparse, and the asker presents it, that is its prefix.
        O(segments of the prompt and its chunks), plus O(log n) for the heap entries of leaves.
        """
        choice = choice or AllStored()
        reader, blend, budgets = _Reader(node, now), asked_blend(query), asked_budgets(query)
        hashes, device_blocks = self.further_stored(query.hashes, query.exact_hashes), query.device_blocks
        found = self._find(hashes, node)
        sparse_from = choice.device_tokens // self._block_tokens
        further = None if budgets is None else self._find_sparse(query, reader, max(found.stored_to, sparse_from))
        if further is not None:
            found, hashes, device_blocks = further, query.hashes, 0
        used: set[Node] = set()
        # With chunks a segment may be met twice; without, the check would only cost time.
        scores = self._scores(found, (lambda link: self._use(link, used)) if blend else self._catalog.use)
        self._renewals.used(now, found.path[: len(found.copies)])
        segments, copies, reason = self._choose(found, hashes, device_blocks, choice)
        extras: dict[str, Any] = {}
        loads = segments
        if further is not None and budgets is not None:
            if segments and segments[-1].end_block <= sparse_from:
                segments, copies = [], []  # the device has as much, dense
            sparse = retained_prefix(budgets, segments, [copy.form for copy in copies])
            loads = segments
            if sparse is not None:
                extras[SPARSE], loads = sparse, []
        reached = max(device_blocks, segments[-1].end_block if segments else 0)
        self._count(hashes, device_blocks, segments)
        if blend is not None:
            prefix = _Prefix(max(device_blocks, found.stored_to), reached)
            stored = self._find_chunks(reader, blend.chunks, prefix, used)
            parts: Sequence[PlannedChunk] = [part for part, _ in stored]
            if parts:
                parts, reason = choice.choose_chunks(reached, reason, parts)
            if parts:
                copies = copies + self._taken(parts, stored, reached)
                terms = blend.ratio, blend.terms.check_layer, choice.blend_seconds()
                extras[BLEND] = PlannedBlend(tuple(parts), *terms)
        lease_id = self._leases.begin(now, replica, copies)
        clock, expected = self._catalog.clock.now, choice.expectation()
        return Plan(lease_id, tuple(loads), reason, scores, clock, self._epoch, expected, extras)

    def reserve(self, now: float, replica: str, node: str, hashes: Sequence[BlockHash]) -> Plan:
        """Lease what a directive will load of a prompt: as `plan`, but count nothing, for no request asked."""
        found = self._find(hashes, node)
        segments, copies, reason = self._choose(found, hashes, 0, AllStored())
        scores = self._scores(found, lambda known: known.score)
        lease_id = self._leases.begin(now, replica, copies)
        return Plan(lease_id, tuple(segments), reason, scores, self._catalog.clock.now, self._epoch)

    def known_ends(self, hashes: Sequence[BlockHash]) -> list[SegmentKey]:
        """Return the known segments that hold leading blocks of a prompt and that none of the others follows on."""
        path, _ = self.known_path(hashes)
        return [node.key for node, below in zip(path, [*path[1:], None], strict=False)
                if below is None or below.parent is not node]  # fmt: skip

    def known_path(self, hashes: Sequence[BlockHash], reader: str = "") -> tuple[list[Node], list[int]]:
        """Return the known segments that hold a prompt's leading blocks, and where each one's part of them ends.

        Stored ones first, as a plan for node ``reader`` finds them, and then what is known beyond them.
        """
        found = self._find(hashes, reader)
        return found.path, found.ends

    def reach(self, hashes: Sequence[BlockHash], tier: Tier | None = None) -> int:
        """Return how many leading blocks of a prompt are stored in a tier, or in any shared one."""
        _, ends, _ = self._stored_path(join_marks(hashes), tier=tier)
        return ends[-1] if ends else 0

    def further_stored(self, hashes: Sequence[BlockHash], others: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """Return those of two names of one prompt under which more of it is stored, and of equals what is nearer.

        The first ones where neither is ahead.
        """
        return others if others and self._stored_reach(others) > self._stored_reach(hashes) else hashes

    def _stored_reach(self, hashes: Sequence[BlockHash]) -> tuple[int, int]:
        """How many leading blocks of a prompt any shared tier has, and a CPU tier."""
        return self.reach(hashes), self.reach(hashes, Tier.CPU)

    def _find(self, hashes: Sequence[BlockHash], reader: str) -> _Found:
        marks = join_marks(hashes)
        path, ends, copies = self._stored_path(marks, reader)
        known, known_ends, _ = self._catalog.trie.runs.path(
            marks, self._blocks_per_segment, _known, ends[-1] if ends else 0
        )
        return _Found(path + known, ends + known_ends, copies)

    def _find_sparse(self, query: PlanQuery, reader: _Reader, dense_blocks: int) -> _Found | None:
        """Return the whole segments that begin a prompt, sparse ones among them; None for no more than dense ones."""
        hashes, most = query.hashes, most_blocks(query, self._block_tokens)
        path, ends, copies = self._stored_path(join_marks(hashes), reader.node, budgets=asked_budgets(query))
        count = end = 0
        for link, part_end in zip(path, ends, strict=False):
            whole = link.start_block == end and link.end_block == part_end <= most
            if not whole or SegmentKey(hashes[part_end - 1]) != link.key:
                break
            count, end = count + 1, part_end
        if end <= dense_blocks or not any(copy.form for copy in copies[:count]):
            return None
        return _Found(path[:count], ends[:count], copies[:count])

    def _find_chunks(
        self, reader: _Reader, chunks: Sequence[ChunkQuery], prefix: _Prefix, used: set[Node]
    ) -> list[tuple[PlannedChunk, list[Copy]]]:
        """Return what is stored of chunks behind a prompt's prefix, with its copies; count the uses."""
        counters = self._counters
        own, loaded = prefix.stored * self._block_tokens, prefix.reached * self._block_tokens
        stored: list[tuple[PlannedChunk, list[Copy]]] = []
        end = 0
        for chunk in chunks:
            if chunk.start_token < end:
                continue  # it overlaps the one before it
            end = chunk.start_token + chunk.tokens
            found_tokens = min(max(0, own - chunk.start_token), chunk.tokens)
            if end > loaded:
                found = self._find(chunk.hashes, reader.node)
                self._scores(found, lambda link: self._use(link, used))
                self._renewals.used(reader.now, found.path[: len(found.copies)])
                tokens = found.stored_to * self._block_tokens
                found_tokens = max(found_tokens, tokens)
                if tokens and chunk.start_token + tokens > loaded:
                    segments, copies, _ = self._choose(found, chunk.hashes, 0, AllStored())
                    stored.append((PlannedChunk(chunk.start_token, tuple(segments)), copies))
            if len(chunks) > 1:
                counters.chunk_tokens_asked += chunk.tokens
                counters.chunk_tokens_found += found_tokens
        return stored

    def _taken(
        self, parts: Sequence[PlannedChunk], stored: Sequence[tuple[PlannedChunk, list[Copy]]], reached: int
    ) -> list[Copy]:
        """Return the copies of the chunks that are blended behind ``reached`` blocks; count what they bring."""
        copies_of = {part.start_token: held for part, held in stored}
        taken: list[Copy] = []
        for part in parts:
            taken += copies_of[part.start_token]
            skipped = max(0, reached * self._block_tokens - part.start_token) // self._block_tokens
            self._count_reused(part.loads, skipped)
        return taken

    def _use(self, node: Node, used: set[Node]) -> float:
        """Count one use of a node by a prompt; return its hotness."""
        if node in used:
            return node.score
        used.add(node)
        return self._catalog.use(node)

    def _scores(self, found: _Found, visit: Callable[[Node], float]) -> tuple[tuple[int, float], ...]:
        """Visit what was found, the deepest first; return where each one's part ends and what the visit says."""
        scores = [(end, visit(link)) for link, end in zip(reversed(found.path), reversed(found.ends), strict=True)]
        return tuple(reversed(scores))

    def _choose(
        self, found: _Found, hashes: Sequence[BlockHash], device_blocks: int, choice: PlanChoice
    ) -> tuple[list[PlannedLoad], list[Copy], PlanReason]:
        """Return which of the stored segments are loaded, as ``choice`` says, their copies, and why."""
        path, ends, copies = found
        first = sum(end <= device_blocks for end in ends[: len(copies)]) if device_blocks else 0
        if first == len(copies):
            return [], [], PlanReason.DEVICE if copies else PlanReason.EVICTED if path else PlanReason.COLD
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
        count, reason = choice.choose(segments)
        return segments[:count], copies[first : first + count], reason

    def _count(self, hashes: Sequence[BlockHash], device_blocks: int, segments: Iterable[PlannedLoad]) -> None:
        counters = self._counters
        counters.plans += 1
        counters.prompt_blocks += len(hashes)
        counters.device_blocks += device_blocks
        self._count_reused(segments, device_blocks)

    def _count_reused(self, segments: Iterable[PlannedLoad], reached: int) -> None:
        """Count the blocks that segments bring after ``reached`` of their chain, by tier."""
        counters = self._counters
        for segment in segments:
            brought = max(0, segment.end_block - reached)
            if segment.tier is Tier.CPU:
                counters.cpu_blocks += brought
            else:
                counters.redis_blocks += brought
            reached = max(reached, segment.end_block)

    def _stored_path(
        self, marks: bytes, reader: str = "", tier: Tier | None = None, budgets: Budgets | None = None
    ) -> tuple[list[Node], list[int], list[Copy]]:
        """Return the stored segments that hold a prompt's leading blocks, where each one's part ends, and their copies.

        ``marks`` are those of the prompt's blocks. The copies are those that a process on node ``reader`` reads
        fastest; with a ``tier``, only its own count. Sparse ones count with ``budgets``, and then those of these.
        """

        def nearest(node: Node) -> Copy | None:
            only = node.copies
            if only is None:
                return None
            if only.next is None and tier is None:
                # `only.resident`, without the call: this runs once for each segment of a prompt
                if only.state is not CopyState.RESIDENT or only.share.retired:
                    return None
                return only if not only.form or serves(only.form, budgets) else None
            found = (
                copy
                for copy in node.all_copies()
                if copy.resident and tier in (None, copy.store.location.tier) and serves(copy.form, budgets)
            )
            return min(found, key=distance, default=None)

        def distance(copy: Copy) -> int:
            at, holder = copy.store.location
            return 2 if at is not Tier.CPU else holder != reader

        return self._catalog.trie.runs.path(marks, self._blocks_per_segment, nearest, rank=lambda copy: -distance(copy))


def _known(node: Node) -> Node:
    """All that is known counts."""
    return node
