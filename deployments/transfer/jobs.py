"""Jobs and counters of the transfer threads (`deployments.transfer.threads`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from deployments.protocol.kv_port import OfferedBlocks
from deployments.transfer.layerwise_save import StepProgress
from deployments.transfer.segment_copy import NULL_BLOCK, SegmentCopier
from kvmanager.loading.prefix_load import PrefixLoad
from kvmanager.moves.plan import PlannedLoad
from kvmanager.segments.spans import SegmentSpan


class StatePart(NamedTuple):
    """The states at the end of a load: `load` is where they are stored, as a segment of one block.

    `tables` has, by group of the model, one device block; what is no state's is not looked at.
    """

    load: PlannedLoad
    copier: SegmentCopier
    tables: Sequence[Sequence[int]]


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Segments for one request. `block_ids` are the device blocks of the sequence from `first_block` on.

    With `on_end` they are for a directive: it is called, from the load thread, with the first block of the sequence
    that did not arrive, and vLLM hears nothing of the load.
    """

    request_id: str
    lease_id: int
    loads: Sequence[PlannedLoad]
    first_block: int
    block_ids: Sequence[int]
    on_end: Callable[[int], None] | None = None
    cutoff: PrefixLoad | None = None
    """Ends the load early where computing the rest is better; None: it goes on to its deadline."""
    write: Callable[[memoryview, PlannedLoad], None] | None = None
    """Writes a segment's stored bytes itself, where they are no dense segment; raises SegmentMismatch. Such a load
    brings all of its segments or nothing."""
    within_s: float | None = None
    """How long the load may take once it has begun; None: as long as any may that brings little."""
    tables: Sequence[Sequence[int]] = ()
    """By group of a model with windows, what `block_ids` are for one group: null blocks where vLLM wants nothing. Such
    a load brings all of its segments or nothing, and vLLM hears of the request, not of its blocks, when it failed."""

    state: StatePart | None = None
    """What comes last of a model with states, without which nothing has come."""

    @property
    def fetched(self) -> list[PlannedLoad]:
        """All that is asked of the port, in order."""
        return [*self.loads, self.state.load] if self.state is not None else list(self.loads)

    @property
    def brings_all_or_nothing(self) -> bool:
        """Whether a part of what is planned is of no use."""
        return self.write is not None or bool(self.tables)

    @property
    def parts(self) -> list[LoadPart]:
        """What each of the segments brings."""
        return load_parts(self.loads, self.first_block, self.first_block + len(self.block_ids))

    def ids_of(self, part: LoadPart) -> Sequence[int]:
        """The device blocks that a part goes into."""
        return self.block_ids[self._place(part)]

    def tables_of(self, part: LoadPart) -> list[Sequence[int]]:
        """The same by group, where there are several."""
        return [table[self._place(part)] for table in self.tables]

    def _place(self, part: LoadPart) -> slice:
        end = part.end_block - self.first_block
        return slice(end - part.blocks, end)


class SegmentTail(Protocol):
    """Puts bytes behind a request's sealed segments, for a tier that knows what they are."""

    def nbytes(self, num_blocks: int) -> int:
        """Return what it puts behind a segment of `num_blocks` blocks, at most. From any thread."""
        ...

    def append(self, sealed: Any) -> Any:
        """Return a sealed segment, bytes as an array, with what goes behind it. From the save thread; may raise."""
        ...

    def end(self) -> None:
        """Hear that the request has ended, and its last save was started. On the engine thread."""
        ...


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Consecutive blocks of one sequence; `block_ids` are the device blocks from `offered.first_block` on.

    Raises ValueError for more or fewer: KV would be stored under the hashes of other blocks.
    `give_back` is called, from the save thread, when the blocks have been copied; `on_end` when all is over, with the
    number of segments that are stored now, or None when the manager did not answer or their copying failed.
    """

    offered: OfferedBlocks
    block_ids: Sequence[int]
    give_back: Callable[[], None]
    fidelity: str
    """That of the names, which the stored segments state."""
    on_end: Callable[[int | None], None] = lambda stored: None
    progress: StepProgress | None = None
    """Of the step that is computing the blocks; None: they hold their KV already."""
    tail: SegmentTail | None = None
    """Puts something behind each of their segments; None: nothing."""
    tables: Sequence[Sequence[int]] = ()
    """By group of a model with windows, what `block_ids` are for one group: null blocks where it is too late."""
    copier: SegmentCopier | None = None
    """What copies them, where they are no blocks of tokens; None: what copies all others."""

    def __post_init__(self) -> None:
        for table in (self.block_ids, *self.tables):
            if len(table) != self.offered.end_block - self.offered.first_block:
                raise ValueError(f"{len(table)} device blocks are not those of {self.offered[1:]}")

    @property
    def num_blocks(self) -> int:
        """Blocks of the sequence whose device blocks the job holds."""
        return len(self.block_ids)

    def ids_of(self, span: SegmentSpan) -> Sequence[int]:
        """The device blocks of a segment of these."""
        return self.block_ids[self._place(span)]

    def tables_of(self, span: SegmentSpan) -> list[Sequence[int]]:
        """The same by group, where there are several."""
        return [table[self._place(span)] for table in self.tables]

    def can_copy(self, span: SegmentSpan) -> bool:
        """Whether each group still has its blocks of a segment; states are held, and other groups have none of them."""
        return self.copier is not None or not any(NULL_BLOCK in table for table in self.tables_of(span))

    def _place(self, span: SegmentSpan) -> slice:
        first = self.offered.first_block
        return slice(span.start_block - first, span.end_block - first)

    def hashes_of(self, span: SegmentSpan) -> bytes:
        """The hashes of a segment's blocks, together."""
        return b"".join(self.offered.hashes[span.start_block : span.end_block])


class LoadPart(NamedTuple):
    """What a load brings of one segment: its blocks after the first `skip_blocks`, up to block `end_block`."""

    load: PlannedLoad
    skip_blocks: int
    blocks: int
    end_block: int

    @property
    def nbytes(self) -> int:
        """Bytes that are read for it."""
        return self.load.read_bytes(self.blocks)


def load_parts(loads: Sequence[PlannedLoad], first_block: int, end_block: int) -> list[LoadPart]:
    """What each of some segments, which follow or overlap each other, brings of blocks `[first_block, end_block)`."""
    parts: list[LoadPart] = []
    position = first_block
    for load in loads:
        upto = max(position, min(load.end_block, end_block))
        parts.append(LoadPart(load, position - load.start_block, upto - position, upto))
        position = upto
    return parts


@dataclass(slots=True)
class LoadTime:
    """What one load got from one tier. The waits for its segments overlap, so only their sum says something."""

    blocks: int = 0
    nbytes: int = 0
    seconds: float = 0.0

    def add(self, blocks: int, nbytes: int, seconds: float) -> None:
        """Note a segment that has been written, `seconds` after the one before."""
        self.blocks += blocks
        self.nbytes += nbytes
        self.seconds += seconds


@dataclass(slots=True)
class TransferCounters:
    """Counts of the threads since start. Written under `KVTransfer`'s lock, read by anyone."""

    segments_loaded: int = 0
    segments_saved: int = 0
    bytes_loaded: int = 0
    bytes_saved: int = 0
    loads_failed: int = 0
    loads_layerwise: int = 0
    loads_shared: int = 0
    saves_dropped: int = 0
    saves_short: int = 0
    mismatches: dict[str, int] = field(default_factory=dict)
