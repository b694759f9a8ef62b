"""The blends of one engine: whether there are any, which requests get one, and where they are made.

The one part of this room that the connector's scheduler side knows. On the engine thread.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from configs.blend_section import DEFAULT_CHECK_LAYER, BlendSettings
from deployments.engine.blending.blend import Blend, BlendOrder, BlendTools
from deployments.engine.blending.counters import BlendCounters
from deployments.engine.blending.model import BlendModel
from deployments.engine.blending.plan import RequestBlend, why_refused
from deployments.engine.blending.queue import BlendQueue
from deployments.engine.blending.refusals import why_not
from deployments.engine.blending.self_test import SelfTestError, self_test
from deployments.protocol.engine_hints import extra
from deployments.protocol.kv_port import KVPort
from deployments.transfer.layerwise_save import HostBuffer
from kvmanager.moves.chunks import BLEND, BlendTerms, PlannedBlend
from kvmanager.moves.plan import Plan

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

    from deployments.transfer.segment_copy import SegmentCopier
    from deployments.transfer.threads import KVTransfer

logger = logging.getLogger(__name__)

UNAVAILABLE = "unavailable"
BUSY = "busy"
"""The queue of blends is full, or its blends held too many blocks for too long: the prompt is computed."""
LARGE = "large"
"""What is between two layers of its rows does not fit `blending.buffer_bytes`."""


class Blends:
    """See the module's docstring."""

    def __init__(
        self,
        settings: BlendSettings,
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
        self._queue = BlendQueue(call, settings.max_blends_waiting, max_held_blocks, slice_s)
        self._buffer_bytes = settings.buffer_bytes
        self._tools: BlendTools | None = None
        if model is not None:
            wanted = settings.check_layer or calibrated_check_layer or DEFAULT_CHECK_LAYER
            check = min(wanted, model.layers - 1)
            self.terms = BlendTerms(check, model.layers)
            buffer = HostBuffer(settings.buffer_bytes)
            self._tools = BlendTools(model, transfer, copier, buffer, port, self.counters, num_running)

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

    def start(self, order: BlendOrder) -> None:
        """Make a blend when those before it have ended. The plan's lease is given back then."""
        assert self._tools is not None
        self._queue.put(Blend(order, self._tools, self._queue.poke))

    def cancel(self, request_id: str) -> None:
        """A request has gone; one without a blend is no error."""
        self._queue.cancel(request_id)


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
