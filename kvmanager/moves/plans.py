"""Plans: what one replica may load for one prompt, under a lease (`kvmanager.moves.leases`).

A plan is about the prompt's own chain of segments, and for a blended prompt about its chunks' chains too
(`kvmanager.moves.chunks`): what is loaded of its own chain is its prefix, and chunks serve what comes after that. All
of it is under one lease. One thread.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NamedTuple, TypeAlias

from kvmanager.index.catalog import Catalog
from kvmanager.index.counters import Counters
from kvmanager.index.locations import Location, Tier
from kvmanager.index.nodes import Copy, CopyState, Node
from kvmanager.moves.chunks import ChunkQuery
from kvmanager.moves.leases import Leases
from kvmanager.moves.renewals import Renewals
from kvmanager.moves.retained_prefixes import RetainedPrefix, SparseQuery, retained_prefix
from kvmanager.segments.budgets import Budgets
from kvmanager.segments.forms import serves
from kvmanager.segments.keys import BlockHash, SegmentKey
from kvmanager.segments.spans import join_marks


class PlanReason(StrEnum):
    """Why a plan is what it is."""

    HIT = "hit"
    """There is something to load, and all that is stored is loaded."""
    PARTIAL = "partial"
    """The first part of what is stored is loaded; computing the rest is faster."""
    RECOMPUTE_FASTER = "recompute_faster"
    """Something is stored, but computing all of it is faster than loading any."""
    BLEND = "blend"
    """Chunks are blended, behind what is loaded of the prompt's own chain, if any."""
    PROBE = "probe"
    """What would be slower, by all that is known, to measure it: one segment more is loaded, or nothing."""
    UNMEASURED = "unmeasured"
    """Something is stored at a tier whose load time is not known, and enough other loads are measuring it."""
    RECOMPUTE_ALWAYS = "recompute_always"
    """Something is stored, but the settings say that nothing is loaded."""
    DEVICE = "device"
    """The replica holds on its device all that is stored of this prompt."""
    EVICTED = "evicted"
    """The prompt's beginning was seen before, but is stored nowhere (any more, or yet)."""
    COLD = "cold"
    """Never seen, or forgotten."""


class PlannedSegment(NamedTuple):
    """One segment to load, and from where."""

    key: SegmentKey
    start_block: int
    num_blocks: int
    location: Location
    nbytes: int
    """Size there, which may be coded."""
    raw_nbytes: int
    """Size in memory, once it has been loaded."""
    used_blocks: int = 0
    """Leading blocks that are loaded of it; 0: all."""
    last_hash: BlockHash | Literal[b""] = b""
    """Hash of the last of these, as the prompt has it; empty when that is the key."""

    @property
    def end_block(self) -> int:
        """First block after those that are loaded."""
        return self.start_block + (self.used_blocks or self.num_blocks)

    @property
    def read_bytes(self) -> int:
        """What a load reads of it: of a CPU tier the part that is used, of Redis, where it may be coded, all."""
        if self.used_blocks and self.location.tier is Tier.CPU:
            return self.nbytes * self.used_blocks // self.num_blocks
        return self.nbytes


Choose: TypeAlias = Callable[[Sequence[PlannedSegment]], tuple[int, PlanReason]]
"""Says how many of the stored segments that begin a prompt to load, from the first on, and why."""


class StoredChunk(NamedTuple):
    """What is stored of a prompt's chunk that begins at token ``start_token``: its leading blocks, from the first on.

    Blocks of ``segments`` are the chunk's own. Its blocks before the end of the prompt's prefix are not needed.
    """

    start_token: int
    segments: tuple[PlannedSegment, ...]

    @property
    def blocks(self) -> int:
        """How many of the chunk's leading blocks are stored."""
        return self.segments[-1].end_block


ChooseChunks: TypeAlias = Callable[[int, PlanReason, Sequence[StoredChunk]], tuple[Sequence[StoredChunk], PlanReason]]
"""Says which of the stored chunks to blend after a number of the prompt's leading blocks, and why, or why none; the
reason so far is that of the prompt's own chain."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Segments to load, in order: each adds the blocks from the end of the one before it to its own, and may begin
    before them. The first may begin inside the device prefix, but ends after it."""

    lease_id: int
    """0 when there is nothing to load, and so nothing to release."""
    segments: tuple[PlannedSegment, ...]
    reason: PlanReason
    scores: tuple[tuple[int, float], ...] = ()
    """(end block, hotness) of each known segment that holds leading blocks of the prompt, in order, this use counted:
    of the stored ones, and of those known beyond them; the end is that of the prompt's part. Scores stay comparable
    without being refreshed (`kvmanager.index.hotness`)."""
    now_score: float = 0.0
    """Hotness of what was used once, now: for blocks of which nothing is known."""
    kept: RetainedPrefix | None = None
    """How the segments are presented where one of them is sparse: all of them then, and nothing without that."""
    chunks: tuple[StoredChunk, ...] = ()
    """What is blended behind the segments and the device prefix, in the prompt's order."""


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


class Planner:
    """Makes plans."""

    def __init__(
        self,
        catalog: Catalog,
        counters: Counters,
        renewals: Renewals,
        leases: Leases,
        blocks_per_segment: int,
        block_tokens: int,
    ) -> None:
        self._catalog = catalog
        self._counters = counters
        self._renewals = renewals
        self._leases = leases
        self._blocks_per_segment = blocks_per_segment
        self._block_tokens = block_tokens

    def plan(
        self,
        now: float,
        replica: str,
        node: str,
        hashes: Sequence[BlockHash],
        device_blocks: int,
        choose: Choose | None = None,
        chunks: Sequence[ChunkQuery] = (),
        choose_chunks: ChooseChunks | None = None,
        sparse: SparseQuery | None = None,
    ) -> Plan:
        """Count one use of every known node that this prompt finds, and lease what is to be loaded of it.

        With ``sparse``, and where more of the prompt is stored so, that is a sparse prefix.

        That is all that is stored unless ``choose`` says less, and of the chunks that end after that prefix all that is
        stored behind it, unless ``choose_chunks`` says less. O(segments of the prompt and its chunks), plus O(log n)
        for the heap entries of leaves.
        """
        found = self._find(hashes, node)
        further = None if sparse is None else self._find_sparse(sparse, node, max(found.stored_to, sparse.least_blocks))
        if further is not None and sparse is not None:
            found, hashes, device_blocks = further, sparse.hashes, 0
        used: set[Node] = set()
        # With chunks a segment may be met twice; without, the check would only cost time.
        scores = self._scores(found, (lambda link: self._use(link, used)) if chunks else self._catalog.use)
        self._renewals.used(now, found.path[: len(found.copies)])
        segments, copies, reason = self._choose(found, hashes, device_blocks, choose)
        kept = None
        if further is not None and sparse is not None:
            if segments and segments[-1].end_block <= sparse.least_blocks:
                segments, copies = [], []  # the device has as much, dense
            kept = retained_prefix(sparse.budgets, [s.num_blocks for s in segments], [copy.form for copy in copies])
        reached = max(device_blocks, segments[-1].end_block if segments else 0)
        self._count(hashes, device_blocks, segments)
        blended: list[StoredChunk] = []
        if chunks:
            stored = self._find_chunks(now, node, chunks, max(device_blocks, found.stored_to), reached, used)
            parts: Sequence[StoredChunk] = [part for part, _ in stored]
            if parts and choose_chunks is not None:
                parts, reason = choose_chunks(reached, reason, parts)
            elif parts:
                reason = PlanReason.BLEND
            copies_of = {part.start_token: held for part, held in stored}
            blended = list(parts)
            for part in blended:
                copies = copies + copies_of[part.start_token]
                skipped = max(0, reached * self._block_tokens - part.start_token) // self._block_tokens
                self._count_reused(part.segments, skipped)
        lease_id = self._leases.begin(now, replica, copies)
        return Plan(lease_id, tuple(segments), reason, scores, self._catalog.clock.now, kept, tuple(blended))

    def reserve(self, now: float, replica: str, node: str, hashes: Sequence[BlockHash]) -> Plan:
        """Lease what a directive will load of a prompt: as `plan`, but count nothing, for no request asked."""
        found = self._find(hashes, node)
        segments, copies, reason = self._choose(found, hashes, 0, None)
        scores = self._scores(found, lambda known: known.score)
        return Plan(self._leases.begin(now, replica, copies), tuple(segments), reason, scores, self._catalog.clock.now)

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

    def _find_sparse(self, sparse: SparseQuery, reader: str, dense_blocks: int) -> _Found | None:
        """Return the whole segments that begin a prompt, sparse ones among them; None for no more than dense ones."""
        path, ends, copies = self._stored_path(join_marks(sparse.hashes), reader, budgets=sparse.budgets)
        count = end = 0
        for link, part_end in zip(path, ends, strict=False):
            whole = link.start_block == end and link.end_block == part_end <= sparse.most_blocks
            if not whole or SegmentKey(sparse.hashes[part_end - 1]) != link.key:
                break
            count, end = count + 1, part_end
        if end <= dense_blocks or not any(copy.form for copy in copies[:count]):
            return None
        return _Found(path[:count], ends[:count], copies[:count])

    def _find_chunks(
        self,
        now: float,
        node: str,
        chunks: Sequence[ChunkQuery],
        prefix_blocks: int,
        reached: int,
        used: set[Node],
    ) -> list[tuple[StoredChunk, list[Copy]]]:
        """Return what is stored of chunks behind ``reached`` blocks of the prompt, with its copies; count the uses.

        ``prefix_blocks`` of the prompt are stored as its own, loaded or not.
        """
        counters = self._counters
        prefix, loaded = prefix_blocks * self._block_tokens, reached * self._block_tokens
        stored: list[tuple[StoredChunk, list[Copy]]] = []
        end = 0
        for chunk in chunks:
            if chunk.start_token < end:
                continue  # it overlaps the one before it
            end = chunk.start_token + chunk.tokens
            found_tokens = min(max(0, prefix - chunk.start_token), chunk.tokens)
            if end > loaded:
                found = self._find(chunk.hashes, node)
                self._scores(found, lambda link: self._use(link, used))
                self._renewals.used(now, found.path[: len(found.copies)])
                tokens = found.stored_to * self._block_tokens
                found_tokens = max(found_tokens, tokens)
                if tokens and chunk.start_token + tokens > loaded:
                    segments, copies, _ = self._choose(found, chunk.hashes, 0, None)
                    stored.append((StoredChunk(chunk.start_token, tuple(segments)), copies))
            if len(chunks) > 1:
                counters.chunk_tokens_asked += chunk.tokens
                counters.chunk_tokens_found += found_tokens
        return stored

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
        self, found: _Found, hashes: Sequence[BlockHash], device_blocks: int, choose: Choose | None
    ) -> tuple[list[PlannedSegment], list[Copy], PlanReason]:
        """Return which of the stored segments are loaded, all or what ``choose`` says, their copies, and why."""
        path, ends, copies = found
        first = sum(end <= device_blocks for end in ends[: len(copies)]) if device_blocks else 0
        if first == len(copies):
            return [], [], PlanReason.DEVICE if copies else PlanReason.EVICTED if path else PlanReason.COLD
        segments = [
            PlannedSegment(
                link.key, link.start_block, link.num_blocks, copy.partition.store.location, copy.nbytes, link.nbytes
            )
            for link, copy in zip(path[first:], copies[first:], strict=False)
        ]
        for number, segment in enumerate(segments):
            used_blocks = ends[first + number] - segment.start_block
            last_hash = hashes[ends[first + number] - 1]
            if SegmentKey(last_hash) != segment.key:  # of a whole one if another sequence has its marks: it is refused
                segments[number] = segment._replace(used_blocks=used_blocks, last_hash=last_hash)
        count, reason = choose(segments) if choose else (len(segments), PlanReason.HIT)
        return segments[:count], copies[first : first + count], reason

    def _count(self, hashes: Sequence[BlockHash], device_blocks: int, segments: Iterable[PlannedSegment]) -> None:
        counters = self._counters
        counters.plans += 1
        counters.prompt_blocks += len(hashes)
        counters.device_blocks += device_blocks
        self._count_reused(segments, device_blocks)

    def _count_reused(self, segments: Iterable[PlannedSegment], reached: int) -> None:
        """Count the blocks that segments bring after ``reached`` of their chain, by tier."""
        counters = self._counters
        for segment in segments:
            brought = max(0, segment.end_block - reached)
            if segment.location.tier is Tier.CPU:
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
