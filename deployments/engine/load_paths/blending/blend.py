"""One request's blend from its turn to its end: fetch its prefix and its chunks, make its rows, report to vLLM.

Life of a blend:  queued → its turn: prefix and chunks on their way → prefix there → items → done

A blend may wait for failed loads of other blends as long as its own loads may take. When that time passes before its
turn, it is given up, and vLLM computes its blocks. It fails where an item raises, or where the prefix does not come:
then the blocks from there on are reported as failed, and vLLM computes them; the request never fails. A cancelled blend
ends at its next turn, but not before the load of its prefix: until a blend is reported as ended, vLLM gives its blocks
to no other request. On the engine thread, except `_arrived`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from deployments.engine.load_paths.blending.chunk_load import ChunkLoad
from deployments.engine.load_paths.blending.counters import CANCELLED, FAILED, LATE, BlendCounters
from deployments.engine.load_paths.blending.job import ROWS_BESIDE_OTHERS, ROWS_PER_ITEM, BlendJob, BlendWork, Item
from deployments.engine.load_paths.blending.model import BlendModel
from deployments.engine.load_paths.blending.plan import RequestBlend
from deployments.protocol.kv_port import KVPort
from deployments.protocol.log_lines import REQUEST_ID, lines_of
from deployments.transfer.jobs import LoadJob
from kvmanager.moves.plan import PlannedLoad

if TYPE_CHECKING:
    from deployments.transfer.layerwise_save import HostBuffer
    from deployments.transfer.segment_copy import SegmentCopier
    from deployments.transfer.threads import KVTransfer

logger = logging.getLogger(__name__)

LEAST_SHARE = 0.1
"""With less than this part of the time that its loads may take a blend does not begin them."""


@dataclass(frozen=True, slots=True)
class BlendTools:
    """The parts that all blends of an engine share."""

    model: BlendModel
    transfer: KVTransfer
    copier: SegmentCopier
    buffer: HostBuffer
    port: KVPort
    counters: BlendCounters
    num_running: Callable[[], int]


@dataclass(frozen=True, slots=True)
class BlendOrder:
    """What a request's blend is to do. Blocks are numbered in its sequence."""

    request_id: str
    plan: RequestBlend
    tokens: Sequence[int]
    block_ids: Sequence[int]
    """The request's device blocks, from block 0 on."""
    device_end: int
    """The first block that the device does not have yet."""
    prefix: Sequence[PlannedLoad]
    """Stored segments that bring the blocks from there on, up to `prefix_end`."""
    prefix_end: int
    end: int
    """The first block that vLLM computes."""
    lease_id: int
    within_s: float
    """How long its loads may take, and it may wait for those of others that come to nothing."""
    on_done: Callable[[Mapping[str, int]], None]
    """Hears how many tokens were reused as they were stored, by tier, when all is well."""


class PrefixMissingError(Exception):
    """The prompt's own stored prefix did not come."""


class Blend:
    """See the module's docstring. A `deployments.engine.load_paths.blending.queue.QueuedBlend`."""

    def __init__(self, order: BlendOrder, tools: BlendTools, poke: Callable[[], None]) -> None:
        self.request_id = order.request_id
        self.blocks = order.end - order.device_end
        self._order = order
        self._tools = tools
        self._poke = poke
        self._cancelled = False
        self._within_s = order.within_s
        self._client_request = REQUEST_ID.get()
        self._began: float | None = None
        self._good_end = order.device_end
        self._chunks: ChunkLoad | None = None
        self._prefix_end: int | None = None
        self._job: BlendJob | None = None
        self._turns = self._all_turns()

    def cancel(self) -> None:
        """See `QueuedBlend`."""
        self._cancelled = True

    @property
    def vain_s(self) -> float:
        """See `QueuedBlend`."""
        chunks_s = self._chunks.vain_s if self._chunks is not None and self._chunks.is_over else 0.0
        lacks_prefix = self._prefix_end is not None and self._prefix_end < self._order.prefix_end
        return max(chunks_s, self._job.parts.prefix_wait_s if self._job is not None and lacks_prefix else 0.0)

    def waited(self, seconds: float) -> bool:
        """See `QueuedBlend`."""
        self._within_s -= seconds
        return self._is_given_up

    @property
    def _is_given_up(self) -> bool:
        allowed_s = self._order.within_s
        return self._began is None and self._within_s < allowed_s and self._within_s <= LEAST_SHARE * allowed_s

    def advance(self, until: float) -> bool | None:
        """See `QueuedBlend`."""
        if self._is_given_up and not self._cancelled:
            self._tools.counters.outcomes[LATE] += 1
            self._end(self._order.block_ids[self._good_end : self._order.end])
            return False
        if self._cancelled:
            if self._began is not None and self._prefix_end is None:
                return None
            self._tools.counters.outcomes[CANCELLED] += 1
            self._end(())
            return False
        began = time.perf_counter()
        try:
            with torch.inference_mode():
                for item in self._turns:
                    if item is Item.WAITS:
                        return None
                    if time.perf_counter() >= until:
                        return True
        except PrefixMissingError:
            self._failed()
        except Exception:
            with lines_of(self._client_request):
                logger.exception("the blend of %s failed; vLLM computes its tokens", self.request_id)
            self._failed()
        else:
            self._done()
        finally:
            self._note_slice(time.perf_counter() - began)
        return False

    def _all_turns(self) -> Generator[Item, None, None]:
        order, tools = self._order, self._tools
        block = tools.model.block_size
        work = BlendWork(
            order.tokens,
            order.block_ids[: order.end],
            order.prefix_end * block,
            order.end * block,
            order.plan.ratio,
            min(order.plan.check_layer, tools.model.layers - 1),
        )
        self._began = began = time.perf_counter()
        self._chunks = self._begin_loads(work)
        self._job = BlendJob(tools.model, work, self._chunks, self._rows_per_item)
        while self._prefix_end is None:
            yield Item.WAITS
        self._job.parts.prefix_wait_s = time.perf_counter() - began
        self._good_end = self._prefix_end
        if self._prefix_end < order.prefix_end:
            raise PrefixMissingError
        yield from self._job.items()

    def _begin_loads(self, work: BlendWork) -> ChunkLoad:
        order, tools = self._order, self._tools
        deadline = time.monotonic() + self._within_s
        chunks = ChunkLoad(
            order.plan.chunks,
            range(work.first, work.end),
            work.check_layer,
            tools.copier,
            tools.buffer,
            tools.transfer,
            deadline,
            self._poke,
            lambda: tools.port.release(order.lease_id),
        )
        if order.prefix_end > order.device_end:
            ids = order.block_ids[order.device_end : order.prefix_end]
            job = LoadJob(self.request_id, order.lease_id, order.prefix, order.device_end, ids, on_end=self._arrived)
            tools.transfer.submit_load(job, deadline)
        else:
            self._prefix_end = order.prefix_end
        tools.transfer.submit_fetch(chunks.run)
        return chunks

    def _arrived(self, end_block: int) -> None:
        """The prefix is there up to that block. On a load thread."""
        self._prefix_end = end_block
        self._poke()

    def _rows_per_item(self) -> int:
        return ROWS_BESIDE_OTHERS if self._tools.num_running() else ROWS_PER_ITEM

    def _failed(self) -> None:
        order = self._order
        self._tools.counters.outcomes[FAILED] += 1
        self._end(order.block_ids[self._good_end : order.end])

    def _done(self) -> None:
        order, tools, job = self._order, self._tools, self._job
        assert job is not None
        assert self._began is not None
        seconds = time.perf_counter() - self._began
        tools.counters.done(seconds, job.parts)
        logger.debug("blend of %s: %.1f ms; %s", self.request_id, 1e3 * seconds, job.parts)
        if order.plan.seconds > 0:
            tools.port.report_rate(("blend", order.plan.seconds, seconds))
        order.on_done(job.left_by_tier)
        self._end(())

    def _end(self, failed: Sequence[int]) -> None:
        self._turns.close()
        if self._chunks is not None:
            self._chunks.let_go()
        else:
            self._tools.port.release(self._order.lease_id)
        self._tools.transfer.end_load(self.request_id, failed)

    def _note_slice(self, seconds: float) -> None:
        if self._job is not None:
            self._job.parts.slices += 1
            self._job.parts.longest_slice_s = max(self._job.parts.longest_slice_s, seconds)
