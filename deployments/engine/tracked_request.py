"""State of one request on the connector's scheduler side while vLLM's scheduler has it. On the engine thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from deployments.engine.pool.block_owners import NO_OWNER, Owner
from deployments.protocol.wire import KVCacheUsage
from deployments.transfer.jobs import SegmentTail, load_parts
from deployments.transfer.shared_loads import MOST_WAITS, Awaited
from kvmanager.moves.plan import PlannedLoad

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from deployments.engine.load_paths.base import LoadPath, Proposal
    from deployments.engine.pool.hotness_queue import Scored

NEVER_SAVED = 1 << 60
"""In the place of the blocks that are saved already: nothing of the request is."""


class SaveLimits(NamedTuple):
    """What of a request is worth keeping."""

    least_tokens: int = 0
    """Of a sequence that is saved at first sight."""
    repeated_blocks: int = 0
    """Its leading blocks that are saved although it is shorter."""
    save_answer: bool = True
    """Whether what is sampled will be a part of a later prompt."""


KEEP_ALL = SaveLimits()


@dataclass(slots=True)
class RequestSources:
    """Where the KV came from that a request entered with: what its usage says."""

    entered_tokens: int
    """How many it came with: its prompt's, and those that a continued request had answered before."""
    by_tier: dict[str, int] | None = None
    """Tokens by tier when the prompt was first admitted, whatever a preemption does later."""
    load_began: float = 0.0
    """Of the last load, if there was one: seconds of `time.monotonic`, as `load_ended`."""
    load_ended: float = 0.0
    more: Mapping[str, int] | None = None
    """Tokens that a path tells of by a name of its own in `KVCacheUsage`."""

    def add(self, name: str, by_tier: Mapping[str, int]) -> None:
        """Count tokens that a path took from the tiers outside the chain of the plan's segments."""
        counted = self.by_tier if self.by_tier is not None else {}
        for tier, tokens in by_tier.items():
            counted[tier] = counted.get(tier, 0) + tokens
        self.by_tier, self.more = counted, {name: sum(by_tier.values())}

    def usage(self, replica: str) -> KVCacheUsage:
        """Return what the answer says."""
        by_tier = self.by_tier or {}
        usage = KVCacheUsage(
            device=by_tier.get("device", 0),
            cpu=by_tier.get("cpu", 0),
            redis=by_tier.get("redis", 0),
            recomputed=self.entered_tokens - sum(by_tier.values()),
            replica=replica,
        )
        if self.more:
            usage.update(self.more)  # type: ignore[typeddict-item]  # its names are the paths' own
        if self.load_ended:
            usage["load"] = (self.load_began, self.load_ended)
        return usage


@dataclass(slots=True)
class TrackedRequest:
    """See the module's docstring."""

    request: Request
    loads: list[PlannedLoad]
    """Stored segments that its plan brings, one chain of names."""
    lease_id: int
    saved_blocks: int
    """Leading blocks that are stored, or on their way; `NEVER_SAVED`: none of it is to be."""
    load_within_s: float
    """How long a load of its plan may take once it has begun."""
    owner: Owner = NO_OWNER
    """Of the blocks that it brings or computes."""
    limits: SaveLimits = KEEP_ALL
    device_tokens: int = 0
    """Leading tokens that the device's own prefix cache had when vLLM last looked."""
    loading_upto_tokens: int = 0
    """End of the load in flight; 0 when there is none."""
    tables: Sequence[Sequence[int]] = ()
    """By group of a model with windows, its device blocks when it was last given some to load into."""
    junction_block: int = 0
    """Of a model with states, the boundary at which another prompt has parted from it; 0: none is known."""
    proposal: Proposal | None = None
    """The load that was last proposed to vLLM; None: nothing was."""
    awaited: Awaited | None = None
    """The load of another request that it waits for, or has waited for since it was last given blocks."""
    waits_left: int = MOST_WAITS
    use: Scored | None = None
    """How hot its plan says it is; None: not known, or the pool does not ask."""
    tail: SegmentTail | None = None
    """What is stored behind each of its segments; None: nothing."""
    sources: RequestSources = field(init=False)
    state: dict[LoadPath, Any] = field(default_factory=dict)
    """What each load path keeps of it, by path. A path that keeps nothing hears nothing of what the request does."""

    def __post_init__(self) -> None:
        """It enters now."""
        self.sources = RequestSources(self.request.num_tokens)

    @property
    def is_loading(self) -> bool:
        """Whether a load is in flight; `num_computed_tokens` must not be trusted then."""
        return self.loading_upto_tokens > 0

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for another request's load."""
        return self.awaited is not None and not self.awaited.load.ended

    @property
    def waited_in_vain(self) -> bool:
        """Whether the load of another request that it waited for has not brought what it wants."""
        return self.awaited is not None and self.awaited.failed

    @property
    def is_never_saved(self) -> bool:
        """Whether nothing of it may be stored."""
        return self.saved_blocks >= NEVER_SAVED

    def give_plan_up(self, arrived: int) -> None:
        """Load nothing more of a plan of which only what lies before block `arrived` came: compute it, and save it."""
        self.saved_blocks = min(self.saved_blocks, arrived)
        self.loads = []

    def loads_between(self, first: int, end: int) -> list[PlannedLoad]:
        """The planned segments that bring blocks from `first` up to `end`: others may overlap these."""
        return [part.load for part in load_parts(self.loads, first, end) if part.blocks]

    def loadable_end(self, first_block: int, block_size: int) -> int:
        """The block up to which planned segments follow `first_block` without a gap; the last token is left out."""
        end = first_block
        if not self.loads or self.loads[-1].end_block <= first_block:
            return end
        for load in self.loads:
            if load.end_block <= end:
                continue
            if load.start_block > end:
                break
            end = load.end_block
        return min(end, (self.request.num_tokens - 1) // block_size)

    def tokens_by_tier(self, arrived_tokens: int, block_size: int) -> dict[str, int]:
        """Split the first `arrived_tokens` tokens by where they came from; device first, then the segments in order."""
        position = min(self.device_tokens, arrived_tokens)
        by_tier = {"device": position}
        for load in self.loads:
            end = min(load.end_block * block_size, arrived_tokens)
            if end > position:
                by_tier[load.tier] = by_tier.get(load.tier, 0) + end - position
                position = end
        return by_tier
