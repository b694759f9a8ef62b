"""A plan on its whole way: what is asked of the manager, and its answer from the brain to the engine.

Values only, immutable once made. They cross processes pickled; into an engine's own process they go by msgspec, which
checks the types (`deployments.protocol.engine_hints`). What an extension asks or answers lies in ``extras``, under a
name that only the extension knows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, NamedTuple

from kvmanager.index.locations import Location, Tier
from kvmanager.segments.keys import BlockHash, SegmentKey


class PlanReason(StrEnum):
    """Why a plan is what it is."""

    HIT = "hit"
    """There is something to load, and all that is stored is loaded."""
    PARTIAL = "partial"
    """The first part of what is stored is loaded; computing the rest is faster."""
    RECOMPUTE_FASTER = "recompute_faster"
    """Something is stored, but computing all of it is faster than loading any."""
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


LANDINGS: Final = "landings"
"""Name of `True` in the terms of an engine whose prompts begin at landings alone (`PlanQuery.needs_landing`)."""


@dataclass(frozen=True)
class PlanQuery:
    """What a replica asks for one prompt."""

    hashes: Sequence[BlockHash]
    """Of the prompt's full blocks, in order."""
    exact_hashes: Sequence[BlockHash] = ()
    """Of the same tokens where they are stored without loss, which a tolerant prompt may read; empty for an exact one.
    """
    prompt_tokens: int = 0
    """Length of the prompt; 0: as many tokens as the hashed blocks have."""
    queued_tokens: int = 0
    """Tokens that the replica computes before it."""
    device_blocks: int = 0
    """Leading blocks that stay on the device for certain, so that nothing is planned for them. A replica names none:
    blocks may leave its device until the prompt's turn comes."""
    needs_landing: bool = False
    """Whether the model has windows or states: a device with the prompt's blocks may lack what it needs of those to
    begin behind them, and all of the prompt is computed then."""
    extras: Mapping[str, Any] = field(default_factory=dict)
    """What extensions ask, by their names."""


class PlannedLoad(NamedTuple):
    """A segment that a shared tier holds: blocks ``start_block`` to ``end_block`` of the sequence.

    Those of a plan follow each other without a gap, but may overlap: from each is taken what lies behind what has come.
    """

    key: SegmentKey
    start_block: int
    num_blocks: int
    """Of the whole segment, as it is stored."""
    tier: Tier
    holder: str
    nbytes: int
    """Size at the tier, which may be coded."""
    raw_nbytes: int = 0
    """Size in memory; 0: the same."""
    used_blocks: int = 0
    """Leading blocks that the plan is about; 0: all."""
    last_hash: bytes = b""
    """Hash of the last of these, as the prompt has it; empty when that is the key."""

    @property
    def location(self) -> Location:
        """The tier and its holder."""
        return Location(self.tier, self.holder)

    @property
    def memory_bytes(self) -> int:
        """Bytes that it takes once it is loaded."""
        return self.raw_nbytes or self.nbytes

    @property
    def blocks(self) -> int:
        """Number of its blocks that the plan is about."""
        return self.used_blocks or self.num_blocks

    @property
    def end_block(self) -> int:
        """First block after those that the plan is about."""
        return self.start_block + (self.used_blocks or self.num_blocks)

    def read_bytes(self, blocks: int) -> int:
        """Return the bytes to read for ``blocks`` of its blocks; a segment from Redis is read whole."""
        return self.nbytes if self.tier == Tier.REDIS else self.nbytes * blocks // self.num_blocks


class PlanExpectation(NamedTuple):
    """What the manager expects of a prompt and its plan, by measured rates; 0 where it cannot know yet."""

    load_s: float = 0.0
    """Until the first token, with the plan."""
    recompute_s: float = 0.0
    """Until the first token, if nothing were loaded."""
    deadline_s: float = 0.0
    """How long the load may take once it has begun (`kvmanager.loading.prefix_load`); 0 where nothing is loaded."""
    device_tokens: int = 0
    """Leading tokens that the device has."""
    short_tokens: int = 0
    """Prompts of fewer tokens are computed sooner than anything is loaded, and need no plan; 0: not known."""


NOTHING_EXPECTED: Final = PlanExpectation()


@dataclass(frozen=True)
class Plan:
    """What one replica may load for one prompt, under a lease.

    Each of ``segments``, in order, adds the blocks from the end of the one before it to its own, and may begin before
    them. The first may begin inside the device prefix, but ends after it.
    """

    lease_id: int = 0
    """0 when there is nothing to load, and so nothing to release."""
    segments: tuple[PlannedLoad, ...] = ()
    reason: str = PlanReason.HIT
    """A `PlanReason`, or an extension's own one."""
    scores: tuple[tuple[int, float], ...] = ()
    """(end block, hotness) of each known segment that holds leading blocks of the prompt, in order, this use counted:
    of the stored ones, and of those known beyond them; the end is that of the prompt's part. Scores stay comparable
    without being refreshed (`kvmanager.index.hotness`)."""
    now: float = 0.0
    """Hotness of what was used once, now: for blocks of which nothing is known."""
    epoch: int = 0
    """Number of the manager: scores of two managers are not comparable."""
    expected: PlanExpectation = NOTHING_EXPECTED
    extras: Mapping[str, Any] = field(default_factory=dict)
    """What extensions answer, by their names."""
