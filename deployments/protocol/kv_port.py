"""The one small object through which the connector meets the manager and the tiers.

The connector (`deployments.engine.connector`) knows vLLM; a port knows Ray. Neither knows the other, so the connector
can run in the replica's process or in a separate engine process, and tests can drive it with a port in memory.

Threads: every method may be called from the transfer threads and may block up to its own deadline, except
`report_placement`, `plan_again` and `release`, which the engine thread calls and which must return at once. No
method raises for a part that is gone, slow or full: the answer is then "nothing" and the port counts it (DESIGN §4,
rule 3).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, NotRequired, Protocol, TypedDict

from kvmanager.index.locations import Tier
from kvmanager.loading.load_rates import Sample
from kvmanager.moves.chunks import BlendQuery as BlendQuery
from kvmanager.moves.chunks import BlendTerms as BlendTerms
from kvmanager.moves.chunks import ChunkQuery as ChunkQuery
from kvmanager.segments.keys import BlockHash
from kvmanager.segments.spans import SegmentSpan

PLAN = "crosskv_plan"
"""Key of a `PlanDict` in vLLM's `kv_transfer_params` of a request."""
TENANT = "crosskv_tenant"
"""Key of the tenant's tag (`kvmanager.segments.keys.tenant_tag`) there; absent where there are no tenants."""
ARRIVED = "crosskv_arrived"
"""Key of a tolerant prompt's arrival at the ingress there, on `time.monotonic`'s clock of this process."""
SHORT_TOKENS = "crosskv_short_tokens"
"""Key, there, of the length below which a sequence is not worth a load (`PlanExpectation`); absent: not known."""
FIDELITY = "crosskv_fidelity"
"""Key of the prompt's fidelity (`kvmanager.segments.keys.Fidelity`) there; absent for an exact one."""

PLAIN_SALT = "crosskv_plain_salt"
"""Key there of the salt that a prompt has without its sparse prefix, under whose names it comes; absent for others."""
ANSWER_GOES = "crosskv_answer_goes"
"""Key there of a request whose answer will not come back, so that its KV is not stored; absent for others."""

PREDICTED_TOKENS = "crosskv_predicted_tokens"
"""Key there of the number of tokens that the answer is expected to have; absent: not known."""


class PlannedLoad(NamedTuple):
    """A segment that a shared tier holds: blocks `start_block` to `end_block` of the sequence.

    Those of a plan follow each other without a gap, but may overlap: from each is taken what lies behind what has come.
    """

    key: bytes
    start_block: int
    num_blocks: int
    """Of the whole segment, as it is stored."""
    tier: str
    holder: str
    nbytes: int
    """Size at the tier, which may be coded."""
    raw_nbytes: int = 0
    """Size in memory; 0: the same."""
    used_blocks: int = 0
    """How many of its blocks the plan is about, from the first on; 0: all."""
    last_hash: bytes = b""
    """Hash of the last of these, as the prompt has it; empty when that is the key."""

    @property
    def memory_bytes(self) -> int:
        """Bytes that it takes once it is loaded."""
        return self.raw_nbytes or self.nbytes

    def read_bytes(self, blocks: int) -> int:
        """Return the bytes to read for `blocks` of its blocks; a segment from Redis is read whole."""
        return self.nbytes if self.tier == Tier.REDIS.value else self.nbytes * blocks // self.num_blocks

    @property
    def end_block(self) -> int:
        """The first block after those that the plan is about."""
        return self.start_block + (self.used_blocks or self.num_blocks)


class PlannedChunk(NamedTuple):
    """What is stored of a blended prompt's chunk that begins at token `start_token`: its leading blocks.

    Blocks of `loads` are numbered from the chunk's first one on, and follow each other as those of a plan.
    """

    start_token: int
    loads: list[PlannedLoad]


class PlannedBlend(TypedDict):
    """What a blended prompt reuses beyond its prefix, and how; in a plan only where that is sooner than a prefill.

    `chunks` lie behind the prefix that the plan's own segments and the device bring, in order, without overlap; their
    segments are under the plan's lease. `ratio` is the share of their tokens that is recomputed, chosen at layer
    `check_layer`; layers before it are computed whole.
    """

    chunks: list[PlannedChunk]
    ratio: float
    check_layer: int
    seconds: float
    """How long the blend should take by the rates of prefills and loads, without corrections from earlier blends; 0:
    not known. The replica reports it with the time that the blend took (`kvmanager.loading.load_rates.Sample`)."""


class PlannedSparse(TypedDict):
    """A tolerant prompt's prefix of which not all KV is kept; such a prompt comes under names of its own.

    `loads` are stored sparse, used whole, and follow each other from the prompt's first block on: `blocks` together,
    fewer than the prompt's tokens. `kept[i][l]`: blocks of keys that layer l keeps of segment i. `forms[i]`: what
    exactly (`kvmanager.segments.forms`), empty for a dense segment. `digest` names what is kept
    (`kvmanager.segments.keys.sparse_salt`). All are under the plan's lease.
    """

    blocks: int
    loads: list[PlannedLoad]
    kept: list[list[int]]
    forms: list[bytes]
    digest: bytes


class PlanExpectation(TypedDict):
    """What the manager expects of a prompt and its plan, by measured rates; 0 where it cannot know yet."""

    load_s: float
    """Until the first token, with the plan."""
    recompute_s: float
    """Until the first token, if nothing were loaded."""
    deadline_s: float
    """How long the load may take once it has begun (`kvmanager.loading.load_deadline`)."""
    device_tokens: int
    """Leading tokens that the device has."""
    short_tokens: int
    """Prompts of fewer tokens are computed sooner than anything is loaded, and need no plan; 0: not known."""


class PlanDict(TypedDict):
    """A plan on its whole way: the manager's answer, and what travels with a request into the engine.

    Plain values only, so that it can cross a process; in an engine's own process a segment arrives as a list.
    `segments` lie from the prompt's first block on, without a gap.
    `scores` lists `(end_block, score)` of the prompt's known segments in order, stored or not, and `now` is the score
    of one use made now: what the device may keep blocks by (`deployments.engine.pool.hotness_queue`). Scores of
    different managers, told apart by `epoch`, are not comparable.
    """

    lease_id: int
    segments: list[PlannedLoad]
    scores: list[tuple[int, float]]
    now: float
    epoch: int
    reason: NotRequired[str]
    """Why the plan is what it is: a `kvmanager.moves.plans.PlanReason`."""
    expected: NotRequired[PlanExpectation]
    blend: NotRequired[PlannedBlend]
    sparse: NotRequired[PlannedSparse]
    """In the place of `segments`, which are for an engine that cannot present it."""


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


class Promotion(NamedTuple):
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

    def report_rate(self, sample: Sample) -> None:
        """Report the time of a load or a prefill. Returns at once."""
        ...

    def plan_again(
        self, hashes: Sequence[BlockHash], prompt_tokens: int, on_plan: Callable[[PlanDict | None], None]
    ) -> None:
        """Ask for a plan over `hashes`, of a request that was preempted; returns at once.

        `on_plan` is called once, from any thread, with None where there is no answer in time.
        """
        ...

    def release(self, lease_id: int) -> None:
        """The plan is used up; a second release is harmless."""
        ...
