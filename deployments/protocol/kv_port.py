"""The one small object through which the connector meets the manager and the tiers.

The connector (`deployments.engine.connector`) knows vLLM; a port knows Ray. Neither knows the other, so the connector
can run in the replica's process or in a separate engine process, and tests can drive it with a port in memory.

Threads: every method may be called from the transfer threads and may block up to its own deadline, except
`report_placement`, `plan_again` and `release`, which the engine thread calls and which must return at once. No
method raises for a part that is gone, slow or full: the answer is then "nothing" and the port counts it (DESIGN §4,
rule 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from kvmanager.loading.load_rates import ExtensionSample, Sample
from kvmanager.moves.plan import Plan, PlannedLoad, PlanQuery
from kvmanager.segments.keys import BlockHash
from kvmanager.segments.spans import SegmentSpan


class LayerArrival(NamedTuple):
    """A part of a load has arrived: the first `layers` layers of segment number `segment` of the load.

    `sealed` is the whole stored segment, of which header, table and those layers hold what was stored (not verified),
    and the rest may still change. None: the segment does not come in time, nor does any after it.
    """

    segment: int
    sealed: memoryview | None
    layers: int


class OfferedBlocks(NamedTuple):
    """Blocks `[first_block, end_block)` of a sequence, which a replica has in hand."""

    hashes: Sequence[BlockHash]
    """Of the sequence's blocks, from block 0 to `end_block`."""
    first_block: int
    end_block: int
    num_prompt_blocks: int
    """How many of the sequence's blocks lie wholly in its prompt; the model sampled what follows."""
    tenant: str = ""
    """Tag of the tenant, empty for none."""


@dataclass(frozen=True, slots=True)
class SaveGrant:
    """The manager's answer to an offer: which segments of the blocks to store, and the reservation they are under."""

    save_id: int
    spans: tuple[SegmentSpan, ...]
    """Parents first; each lies in the offered blocks."""


class PrefetchGrant(NamedTuple):
    """The manager's answer to a tier that fetches segments from Redis: the segments to keep."""

    save_id: int = 0
    keys: Sequence[bytes] = ()
    """Of these and those `above`; parents first."""
    above: Sequence[tuple[bytes, int]] = ()
    """Key and raw size of what they follow on and the tier lacks: to be fetched and kept too, parents first."""


class KVPort(Protocol):
    """See the module's docstring for threads and errors."""

    def fetch(self, loads: Sequence[PlannedLoad], deadline: float) -> Iterator[memoryview | None]:
        """The stored bytes of each segment, in order, as they arrive. None ends it: that one did not come in time.

        No segment is asked for twice. `deadline` is on `time.monotonic`'s clock. The bytes are read-only, not
        verified, and valid until the next item is asked for.
        """
        ...

    def brings_layers(self, tier: str) -> bool:
        """Whether `fetch_layers` brings a tier's segments layer group by layer group. Returns at once."""
        ...

    def fetch_layers(
        self, loads: Sequence[PlannedLoad], group_ends: Sequence[int], deadline: float
    ) -> Iterator[LayerArrival]:
        """As `fetch`, for tiers that bring layers, group by group: the first group of all segments first.

        `group_ends` are the ends of the groups of layers, ascending, the last one the number of layers. The bytes are
        valid until the iterator is closed.
        """
        ...

    def offer(self, offered: OfferedBlocks, segment_bytes: Sequence[int]) -> SaveGrant | None:
        """Ask which segments to store; None when the manager does not answer.

        `segment_bytes[k]` is the sealed size of a segment of k + 1 blocks, up to the most that a segment has.
        """
        ...

    def store(self, grant: SaveGrant, segments: Sequence[tuple[SegmentSpan, Any]]) -> int:
        """Hand sealed segments (numpy uint8 arrays, parents first) to the tier; return how many of the first it kept.

        Those become visible to plans.
        """
        ...

    def report_bad(self, load: PlannedLoad, reason: str) -> None:
        """A fetched segment failed verification: it must not be planned again."""
        ...

    def report_placement(self, stored: list[bytes], removed: list[bytes], cleared: bool) -> None:
        """Block hashes that entered and left the device pool since the last report; `cleared`: all left first."""
        ...

    def report_rate(self, sample: Sample | ExtensionSample) -> None:
        """Report the time of a load or a prefill. Returns at once."""
        ...

    def plan_again(self, query: PlanQuery, on_plan: Callable[[Plan | None], None]) -> None:
        """Ask for another plan, of a request that was preempted; returns at once.

        `on_plan` is called once, from any thread, with None where there is no answer in time.
        """
        ...

    def release(self, lease_id: int) -> None:
        """The plan is used up; a second release is harmless."""
        ...


def in_layer_groups(segments: Iterable[memoryview | None], ends: Sequence[int]) -> Iterator[LayerArrival]:
    """Do `KVPort.fetch_layers` with what `KVPort.fetch` yields, where nothing of it becomes invalid: whole segments.

    The first group of each segment is handed on as soon as the segment is there, the further groups when all are.
    """
    arrived: list[memoryview] = []
    for number, sealed in enumerate(segments):
        yield LayerArrival(number, sealed, ends[0])
        if sealed is None:
            break
        arrived.append(sealed)
    for end in ends[1:]:
        for number, sealed in enumerate(arrived):
            yield LayerArrival(number, sealed, end)
