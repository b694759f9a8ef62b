"""The one small object through which the connector meets the manager and the tiers.

The connector (`deployments.connector`) knows vLLM; a port knows Ray. Neither knows the other, so the connector can
run in the replica's process or in a separate engine process, and tests can drive it with a port in memory.

Threads: every method may be called from the transfer threads and may block up to its own deadline, except
`report_placement` and `release`, which the engine thread calls and which must return at once. No method raises for
a part that is gone, slow or full: the answer is then "nothing" and the port counts it (DESIGN §4, rule 3).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypedDict

from kvmanager.segments import SegmentSpan

PLAN = "crosskv_plan"
"""Key of a `PlanDict` in vLLM's `kv_transfer_params` of a request."""


class PlanDict(TypedDict):
    """A plan as it travels with a request into the engine. Plain values only, so that it can cross a process.

    `segments` lists `(key, start_block, num_blocks, tier, holder, nbytes)` from the prompt's first block on, without a
    gap; `nbytes` is the size of the sealed segment.
    """

    lease_id: int
    segments: list[tuple[bytes, int, int, str, str, int]]


@dataclass(frozen=True, slots=True)
class PlannedLoad:
    """A segment that a shared tier holds: blocks `start_block` to `end_block` of the sequence."""

    key: bytes
    start_block: int
    num_blocks: int
    tier: str
    holder: str
    nbytes: int

    @property
    def end_block(self) -> int:
        """The first block after the segment."""
        return self.start_block + self.num_blocks


@dataclass(frozen=True, slots=True)
class SaveGrant:
    """The manager's answer to an offer: which of the offered segments to store, and the reservation they are under."""

    save_id: int
    keys: frozenset[bytes]


class KVPort(Protocol):
    """See the module's docstring for threads and errors."""

    def fetch(self, loads: Sequence[PlannedLoad], deadline: float) -> Iterator[memoryview | None]:
        """The stored bytes of each segment, in order, as they arrive; None for one that did not come in time.

        `deadline` is on `time.monotonic`'s clock. The bytes are read-only, not verified, and valid until the next item
        is asked for.
        """
        ...

    def offer(self, spans: Sequence[SegmentSpan], segment_bytes: Sequence[int]) -> SaveGrant | None:
        """Ask which segments to store; None when the manager does not answer."""
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

    def release(self, lease_id: int) -> None:
        """The plan is used up; a second release is harmless."""
        ...
