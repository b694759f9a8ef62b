"""Blend: KV of chunks that are no prefix, behind what is stored of the prompt (README.md).

Says whether an engine blends at all, which requests get a blend, and where it is made. This path keeps a state of a
request from its entry until it is given blocks, which is a `RequestBlend`, and then until its blend has ended. Only
once: what a preemption throws away is computed. On the engine thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from configs.blending import DEFAULT_CHECK_LAYER, read_blend_profile
from deployments.engine.load_paths.base import WAIT, Ask, LoadPath, Proposal
from deployments.engine.load_paths.blending.blend import Blend, BlendOrder, BlendTools
from deployments.engine.load_paths.blending.counters import BlendCounters
from deployments.engine.load_paths.blending.model import BlendModel
from deployments.engine.load_paths.blending.plan import RequestBlend, why_refused
from deployments.engine.load_paths.blending.queue import MOST_WAITING, BlendQueue
from deployments.engine.load_paths.blending.refusals import why_not
from deployments.engine.load_paths.blending.self_test import SelfTestError, self_test
from deployments.engine.scheduling.steps import steps_of
from deployments.engine.tracked_request import TrackedRequest
from deployments.protocol.engine_hints import EngineHints, extra
from deployments.protocol.kv_port import KVPort
from deployments.transfer.layerwise_save import HostBuffer
from kvmanager.extensions.blend.chunks import BLEND, BlendTerms, PlannedBlend
from kvmanager.moves.plan import Plan

if TYPE_CHECKING:
    from prometheus_client.core import Metric
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

    from deployments.engine.load_paths.parts import EngineParts
    from deployments.transfer.segment_copy import SegmentCopier
    from deployments.transfer.threads import KVTransfer

logger = logging.getLogger(__name__)

UNAVAILABLE = "unavailable"
BUSY = "busy"
"""The queue of blends is full, or its blends held too many blocks for too long: the prompt is computed."""
LARGE = "large"
"""What is between two layers of its rows does not fit `BUFFER_BYTES`."""
BUFFER_BYTES = 512 * 1024**2
"""Most host memory for the chunks' KV of a blend; the rest of a longer one is computed."""


@dataclass(frozen=True, slots=True)
class BlendProposal(Proposal):
    """A blend that has room."""

    blend: RequestBlend = field(kw_only=True)


@dataclass(slots=True)
class BlendUnderWay:
    """A blend that was started."""

    reused: Mapping[str, int] = field(default_factory=dict)
    """Tokens by tier that it has taken as they were stored, once it has ended well."""

    def note(self, reused: Mapping[str, int]) -> None:
        """The blend has ended well."""
        self.reused = reused


class BlendPath(LoadPath):
    """See the module's docstring. `terms`: how the engine blends; None: not at all."""

    needs_state = True

    def __init__(
        self,
        block_size: int,
        model: BlendModel | None,
        transfer: KVTransfer,
        copier: SegmentCopier,
        port: KVPort,
        call: Callable[[Callable[[], None]], Any],
        num_running: Callable[[], int],
        max_held_blocks: int,
        calibrated_check_layer: int | None = None,
        slice_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        """`model`: None where nothing is blended. `calibrated_check_layer`: what `make profile-blend` found.

        `slice_s`: seconds that a blend may take of the engine at once while requests decode; None: as long as a step.

        `max_held_blocks`: device blocks of the blends that are made and wait; beyond them prompts wait without any.
        """
        self.counters = BlendCounters()
        self.counters.available = model is not None
        self.terms: BlendTerms | None = None
        self._queue = BlendQueue(call, MOST_WAITING, max_held_blocks, slice_s)
        self._block_size = block_size
        self._buffer_bytes = BUFFER_BYTES
        self._tools: BlendTools | None = None
        if model is not None:
            wanted = calibrated_check_layer or DEFAULT_CHECK_LAYER
            check = min(wanted, model.layers - 1)
            self.terms = BlendTerms(check, model.layers)
            buffer = HostBuffer(BUFFER_BYTES)
            self._tools = BlendTools(model, transfer, copier, buffer, port, self.counters, num_running)

    def entered(self, request: TrackedRequest, hints: EngineHints) -> None:
        """See `LoadPath`. A request that a path before this one has taken for itself is not blended."""
        if request.state:
            return
        blend = self.of_request(request.request, hints.plan, hints.fidelity)
        if blend is not None:
            request.state[self] = blend

    def propose(self, request: TrackedRequest, first_block: int) -> Ask:
        """See `LoadPath`. A blend begins behind the prompt's own stored KV, which is loaded with it."""
        blend = request.state.get(self)
        if not isinstance(blend, RequestBlend) or request.wait.was_in_vain:
            return None
        block = self._block_size
        prefix_end = request.loadable_end(first_block, block)
        end = blend.end_block(prefix_end * block, (request.request.num_prompt_tokens - 1) // block, block)
        if end <= prefix_end:
            return None
        takes = self.takes(blend, (end - prefix_end) * block, end - first_block)
        if takes is None:
            return WAIT
        if not takes:
            del request.state[self]
            return None
        return BlendProposal(self, end, blend=blend)

    def admitted(self, request: TrackedRequest) -> None:
        """See `LoadPath`."""
        if isinstance(request.state[self], RequestBlend):
            del request.state[self]

    def start(
        self,
        request: TrackedRequest,
        block_ids: Sequence[int],
        proposal: Proposal,
        ended: Callable[[TrackedRequest, int], None],
    ) -> None:
        """Make the blend when those before it have ended. The plan's lease is given back then."""
        assert isinstance(proposal, BlendProposal)
        assert self._tools is not None
        first, end = request.device_tokens // self._block_size, request.loading_upto_tokens // self._block_size
        loads = request.plan.between(first, end)
        under_way = request.state[self] = BlendUnderWay()
        order = BlendOrder(
            request_id=request.request.request_id,
            plan=proposal.blend,
            tokens=request.request.prompt_token_ids or (),
            block_ids=block_ids,
            device_end=first,
            prefix=loads,
            prefix_end=max(first, loads[-1].end_block) if loads else first,
            end=end,
            lease_id=request.plan.lease_id,
            within_s=request.plan.within_s,
            on_done=under_way.note,
        )
        self._queue.put(Blend(order, self._tools, self._queue.poke))

    def ended(self, request: TrackedRequest, tokens: int) -> None:
        """See `LoadPath`. Of blended tokens, the recomputed ones count for no tier."""
        under_way: BlendUnderWay = request.state.pop(self)
        if under_way.reused:
            request.sources.add("blended", under_way.reused)

    def left(self, request: TrackedRequest) -> None:
        """See `LoadPath`. A blend under way ends as soon as nothing writes into its blocks."""
        if isinstance(request.state[self], BlendUnderWay):
            self._queue.cancel(request.request.request_id)

    def families(self) -> Iterable[Metric]:
        """See `LoadPath`."""
        return self.counters.registry.collect()

    def of_request(self, request: Request, plan: Plan | None, fidelity: str) -> RequestBlend | None:
        """The blend that a plan has for a request; None, and counted, where it has one that is not made."""
        planned = extra(plan, BLEND, PlannedBlend)
        if plan is None or planned is None:
            return None
        why = UNAVAILABLE if self._tools is None else why_refused(request, fidelity)
        if why is not None:
            self.counters.refused(why)
            return None
        return RequestBlend.read(planned, plan.expected)

    def takes(self, blend: RequestBlend, rows: int, blocks: int) -> bool | None:
        """Return whether a blend of `rows` tokens and `blocks` blocks has room; None: not yet, ask again.

        A refusal is counted. A waiting request holds no blocks yet. Without the wait, a device with room for few
        prompts would compute the next one during the blend, at many times its cost.
        """
        assert self._tools is not None
        if rows * self._tools.model.row_bytes > self._buffer_bytes:
            self.counters.refused(LARGE)
        elif self._queue.has_room(blocks):
            return True
        elif not self._queue.is_full and blend.goes_on_waiting(time.monotonic()):
            return None
        else:
            self.counters.refused(BUSY)
        return False


def build(parts: EngineParts) -> BlendPath:
    """Return the path of an engine, which is there to count refusals even if nothing can be blended."""
    scheduler = parts.scheduler
    pool = scheduler.kv_cache_manager.block_pool
    find = partial(model_to_blend, parts.config, parts.loop.runner, pool, parts.copier)
    calibrated = read_blend_profile(parts.settings.model_source)
    steps = steps_of(scheduler)
    return BlendPath(
        parts.block_size,
        parts.loop.call(find).result(),
        parts.transfer,
        parts.copier,
        parts.port,
        parts.loop.call,
        lambda: len(scheduler.running),
        parts.max_held_blocks,
        calibrated.check_layer if calibrated else None,
        steps.slice_s if steps else lambda: None,
    )


def model_to_blend(config: VllmConfig, runner: Any, pool: Any, copier: SegmentCopier) -> BlendModel | None:
    """The model of a built engine, if it is one that can be blended and its self-test is right; else None, logged.

    On the engine thread, before anything is in the pool.
    """
    why = why_not(config, runner)
    if why is None:
        try:
            model = BlendModel(runner)
            error = self_test(model, pool, copier, config.model_config.max_model_len)
        except SelfTestError as wrong:
            why = str(wrong)
        except Exception as raised:
            logger.debug("the self-test of blending raised", exc_info=True)
            why = f"its self-test raised {raised!r}"
        else:
            logger.debug("blending is on; its self-test differs from vLLM by %.2g", error)
            return model
    logger.warning("blending is off, prompts are computed instead: %s", why)
    return None
