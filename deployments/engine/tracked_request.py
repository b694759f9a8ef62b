"""State of one request on the connector's scheduler side while vLLM's scheduler has it. On the engine thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from deployments.engine.pool.block_owners import NO_OWNER, Owner
from deployments.protocol.wire import KVCacheUsage
from deployments.transfer.jobs import SegmentTail, load_parts
from deployments.transfer.shared_loads import SharedWait
from kvmanager.moves.plan import PlannedLoad

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from deployments.engine.load_paths.base import LoadPath, Proposal

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
class SaveProgress:
    """What of a request is stored, and what is to be."""

    blocks: int = 0
    """Leading blocks that are stored, or on their way; `NEVER_SAVED`: none of it is to be."""
    limits: SaveLimits = KEEP_ALL
    tail: SegmentTail | None = None
    """What is stored behind each of its segments; None: nothing."""
    kept_boundary: int = 0
    """Of a model with states, the block at which others part from its prompt, or may; 0: none is known."""

    @property
    def is_never(self) -> bool:
        """Whether nothing of it may be stored."""
        return self.blocks >= NEVER_SAVED

    def limit(self, limits: SaveLimits) -> None:
        """The request enters: this of it is worth keeping."""
        self.limits = limits

    def reach(self, end_block: int) -> None:
        """Blocks up to `end_block` are stored, or on their way."""
        self.blocks = end_block

    def fall_back(self, end_block: int) -> None:
        """Nothing behind `end_block` is stored under the request's names."""
        self.blocks = min(self.blocks, end_block)

    def never(self) -> None:
        """Store nothing more of it."""
        self.blocks = NEVER_SAVED

    def put_behind(self, tail: SegmentTail | None) -> None:
        """Store something behind each of its segments."""
        self.tail = tail

    def keep_boundary(self, block: int) -> None:
        """Store the states at a block too."""
        self.kept_boundary = block


@dataclass(slots=True)
class PlannedChain:
    """The stored segments that a request's plan brings, one chain of names, under a lease."""

    loads: Sequence[PlannedLoad]
    lease_id: int
    within_s: float
    """How long a load may take once it has begun."""

    def become(self, loads: Sequence[PlannedLoad], lease_id: int) -> None:
        """Bring other segments, under a lease of theirs."""
        self.loads, self.lease_id = loads, lease_id

    def drop(self) -> None:
        """Bring nothing more. The lease is not given back."""
        self.loads = ()

    def between(self, first: int, end: int) -> list[PlannedLoad]:
        """The segments that bring blocks from `first` up to `end`: others may overlap these."""
        return [part.load for part in load_parts(self.loads, first, end) if part.blocks]

    def end_behind(self, first_block: int) -> int:
        """The block up to which segments follow `first_block` without a gap."""
        end = first_block
        if not self.loads or self.loads[-1].end_block <= first_block:
            return end
        for load in self.loads:
            if load.end_block <= end:
                continue
            if load.start_block > end:
                break
            end = load.end_block
        return end

    def by_tier(self, device_tokens: int, arrived_tokens: int, block_size: int) -> dict[str, int]:
        """Split the first `arrived_tokens` tokens by where they came from: the device's first, then the segments'."""
        position = min(device_tokens, arrived_tokens)
        by_tier = {"device": position}
        for load in self.loads:
            end = min(load.end_block * block_size, arrived_tokens)
            if end > position:
                by_tier[load.tier] = by_tier.get(load.tier, 0) + end - position
                position = end
        return by_tier


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

    def admitted(self, device_tokens: int) -> None:
        """The request has its blocks, and no load begins."""
        if self.by_tier is None:
            self.by_tier = {"device": device_tokens}

    def load_begins(self, now: float) -> None:
        """A load begins, at `now` of `time.monotonic`."""
        self.load_began = now

    def load_ends(self, now: float, by_tier: Mapping[str, int]) -> None:
        """The load has ended; `by_tier`: where the tokens came from that are there. Empty: none are."""
        self.load_ended = now
        if self.by_tier is None and by_tier:
            self.by_tier = dict(by_tier)

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
    plan: PlannedChain
    saving: SaveProgress = field(default_factory=SaveProgress)
    owner: Owner = NO_OWNER
    """Of the blocks that it brings or computes."""
    device_tokens: int = 0
    """Leading tokens that the device's own prefix cache had when vLLM last looked."""
    proposal: Proposal | None = None
    """The load that was last proposed to vLLM; None: nothing was."""
    loading_upto_tokens: int = 0
    """End of the load in flight; 0 when there is none."""
    tables: Sequence[Sequence[int]] = ()
    """By group of a model with windows, its device blocks when it was last given some to load into."""
    wait: SharedWait = field(default_factory=SharedWait)
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

    def proposed(self, device_tokens: int, proposal: Proposal | None) -> None:
        """vLLM has found tokens on the device, and is told of a load, or of none."""
        self.device_tokens, self.proposal = device_tokens, proposal

    def begin_load(self, upto_tokens: int, tables: Sequence[Sequence[int]]) -> None:
        """What was proposed is brought, into blocks of `tables` where there are several groups."""
        self.loading_upto_tokens, self.tables = upto_tokens, tables

    def end_load(self) -> None:
        """The load has ended."""
        self.loading_upto_tokens = 0

    def give_plan_up(self, arrived: int) -> None:
        """Load nothing more of a plan of which only what lies before block `arrived` came: compute it, and save it."""
        self.saving.fall_back(arrived)
        self.plan.drop()

    def preempted(self) -> None:
        """It loses its blocks, and its plan; it may wait for other loads again."""
        self.plan.become((), 0)
        self.wait = SharedWait(self.wait.awaited)

    def start_over(self) -> None:
        """It has other names now, under which nothing of it is planned or stored."""
        self.give_plan_up(0)
        self.wait.end()

    def loadable_end(self, first_block: int, block_size: int) -> int:
        """The block up to which planned segments follow `first_block` without a gap; the last token is left out."""
        return min(self.plan.end_behind(first_block), (self.request.num_tokens - 1) // block_size)
