"""State of one request on the connector's scheduler side while vLLM's scheduler has it. On the engine thread."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from deployments.engine.blending.plan import RequestBlend
from deployments.engine.pool.block_owners import Owner
from deployments.engine.scheduling.preemption import Preemption
from deployments.engine.sparse.prefix import PlannedPrefix
from deployments.protocol.wire import KVCacheUsage
from deployments.transfer.jobs import load_parts
from deployments.transfer.shared_loads import MOST_WAITS, Awaited
from kvmanager.moves.plan import PlannedLoad
from kvmanager.segments.format import EXACT

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request


@dataclass(slots=True)
class TrackedRequest:
    """See the module's docstring."""

    request: Request
    loads: list[PlannedLoad]
    lease_id: int
    saved_blocks: int
    load_within_s: float
    """How long a load of its plan may take once it has begun."""
    least_tokens: int = 0
    """Of a sequence that is saved at first sight."""
    repeated_blocks: int = 0
    """Its leading blocks that are saved although it is shorter."""
    tenant: str = ""
    """The tenant's tag, empty for none."""
    fidelity: str = EXACT
    save_answer: bool = True
    """Whether what is sampled will be a part of a later prompt."""
    sparse: PlannedPrefix | None = None
    """The sparse prefix that it begins with, under whose names it runs."""
    device_tokens: int = 0
    """Leading tokens that the device's own prefix cache had when vLLM last looked."""
    loading_upto_tokens: int = 0
    """End of the load in flight; 0 when there is none."""
    layerwise_patience_s: float | None = None
    """How long the load that was last proposed to vLLM may take layer by layer; None: it is asynchronous."""
    hidden: Sequence[KVCacheBlock] = ()
    """Blocks of a failed layerwise load that no other request may find before they are computed."""
    hidden_from: int = 0
    """Block of the sequence that the first of `hidden` is."""
    scores: Sequence[tuple[int, float]] = ()
    """`(end_block, score)` of the known segments that the prompt begins with."""
    now: float = 0.0
    """Score of the use that this request is."""
    epoch: int = 0
    """Of the manager that said so."""
    awaited: Awaited | None = None
    """The load of another request that it waits for, or has waited for since it was last given blocks."""
    waits_left: int = MOST_WAITS
    load_began: float = 0.0
    """Of the last load, if there was one: seconds of `time.monotonic`, as `load_ended`."""
    load_ended: float = 0.0
    blend: RequestBlend | None = None
    """What its plan has of chunks, until it was given blocks. Never in `loads`, which are one chain of names."""
    blend_end: int = 0
    """The block up to which the load that was last proposed to vLLM is blended; 0: it is not."""
    blended: Mapping[str, int] = field(default_factory=dict)
    """Tokens by tier that a blend took as they were stored."""
    preemption: Preemption | None = None
    """Its last one, until it runs again."""
    sources: dict[str, int] | None = None
    """Tokens by tier when the prompt was first admitted: what usage reports, whatever a preemption does later."""
    entered_tokens: int = field(init=False)
    """How many it came with: its prompt's, and those that a continued request had answered before."""

    def __post_init__(self) -> None:
        """It enters now."""
        self.entered_tokens = self.request.num_tokens

    def note_blended(self, by_tier: Mapping[str, int]) -> None:
        """The load in flight, a blend, has ended well."""
        self.blended = by_tier

    @property
    def owner(self) -> Owner:
        """Of the blocks that it brings or computes."""
        return Owner(self.tenant, self.fidelity)

    @property
    def is_loading(self) -> bool:
        """Whether a load is in flight; `num_computed_tokens` must not be trusted then."""
        return self.loading_upto_tokens > 0

    @property
    def is_waiting(self) -> bool:
        """Whether it waits for another request's load."""
        return self.awaited is not None and not self.awaited.load.ended

    def loads_between(self, first: int, end: int) -> list[PlannedLoad]:
        """The planned segments that bring blocks from `first` up to `end`: others may overlap these."""
        return [part.load for part in load_parts(self.loads, first, end) if part.blocks]

    def loadable_end(self, first_block: int, block_size: int) -> int:
        """The block up to which planned segments follow `first_block` without a gap; the last token is left out."""
        end = first_block
        for load in self.loads:
            if load.end_block <= end:
                continue
            if load.start_block > end:
                break
            end = load.end_block
        return min(end, (self.request.num_tokens - 1) // block_size)

    def tokens_by_tier(self, arrived_tokens: int, block_size: int) -> dict[str, int]:
        """Split the first `arrived_tokens` tokens by where they came from; device first, then the segments in order.

        Of blended tokens, the recomputed ones count for no tier.
        """
        position = min(self.device_tokens, arrived_tokens)
        by_tier = {"device": position}
        for load in self.loads:
            end = min(load.end_block * block_size, arrived_tokens)
            if end > position:
                by_tier[load.tier] = by_tier.get(load.tier, 0) + end - position
                position = end
        for tier, tokens in self.blended.items():
            by_tier[tier] = by_tier.get(tier, 0) + tokens
        return by_tier

    def usage(self, replica: str) -> KVCacheUsage:
        """Where the KV of what it entered with came from: of its prompt, as its answer says."""
        by_tier = self.sources or {}
        usage = KVCacheUsage(
            device=by_tier.get("device", 0),
            cpu=by_tier.get("cpu", 0),
            redis=by_tier.get("redis", 0),
            recomputed=self.entered_tokens - sum(by_tier.values()),
            replica=replica,
        )
        if self.blended:
            usage["blended"] = sum(self.blended.values())
        if self.load_ended:
            usage["load"] = (self.load_began, self.load_ended)
        return usage
