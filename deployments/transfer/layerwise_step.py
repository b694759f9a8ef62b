"""The layerwise loads and saves of the engine's present step, from its planning to its end. On the engine thread.

`SchedulerSide` begins a load while the step is being planned; the attention layers wait, one after the other, for what
they need; when the step has been computed all its loads end: what did not arrive goes back to vLLM as blocks to
recompute, before anything of the step counts. What the step computes is saved layer by layer by the save thread, which
hears here how far the step is, and whether it counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from deployments.transfer.layerwise_choice import LayerwiseChoice, MeasuredRates
from deployments.transfer.layerwise_load import LayerwiseLoad
from deployments.transfer.layerwise_save import HostBuffer, StepProgress
from deployments.transfer.layerwise_times import LayerTimes
from deployments.transfer.threads import KVTransfer, LoadJob

if TYPE_CHECKING:
    from collections.abc import Sequence

    from deployments.transfer.layerwise_streams import TransferStreams
    from deployments.transfer.segment_copy import SegmentCopier

LEAST_PREFILL_TOKENS = 2
"""A step of one token decodes. Steps of a few tokens tell what a step takes at least, behind which a load can hide."""


class LayerwiseStep:
    """See the module's docstring. `times`, `choice` and `saves` (whether to save layerwise) are for others to read."""

    def __init__(
        self,
        copier: SegmentCopier,
        transfer: KVTransfer,
        choice: LayerwiseChoice,
        rates: MeasuredRates,
        group_ends: Sequence[int],
        streams: TransferStreams,
        buffer_bytes: int,
        saves: bool,
        on_wait: Callable[[float], None] = lambda seconds: None,
    ) -> None:
        """`on_wait` hears for how many seconds the step that is being planned may wait for a load."""
        self.saves = saves
        self.buffer = HostBuffer(buffer_bytes)
        self.times = LayerTimes(len(copier.layers))
        self.choice = choice
        self._copier = copier
        self._transfer = transfer
        self._rates = rates
        self._group_ends = group_ends
        self._streams = streams
        self._on_wait = on_wait
        self._loads: list[tuple[LayerwiseLoad, int, Callable[[int], None]]] = []
        self._saves: list[tuple[str, StepProgress]] = []
        self._step_tokens = self._step_context = 0
        self._step_began = 0.0
        self._waited_s = 0.0

    def begin_load(self, job: LoadJob, timeout_s: float, on_end: Callable[[int], None]) -> None:
        """Start a load for the step that is being planned.

        `on_end` hears, when the step has been computed, the first block of the sequence that did not arrive.
        """
        group_bytes = self.choice.group_bytes(len(job.block_ids))
        if not self.buffer.take(group_bytes):
            group_bytes = 0  # nothing to give back; `choice` has seen to it that this does not happen
        deadline = time.monotonic() + timeout_s
        self._on_wait(timeout_s)
        load = LayerwiseLoad(
            job, self._copier, self._group_ends, deadline, self._streams, self.times, self._transfer.note_mismatch
        )
        self._loads.append((load, group_bytes, on_end))
        self._transfer.submit_fetch(load.run)

    def begin_save(self, request_id: str) -> StepProgress:
        """Return how far the step that is being planned is, for a save of what it computes of a request."""
        progress = StepProgress(len(self._copier.layers), self._streams)
        self._saves.append((request_id, progress))
        return progress

    def begin_step(self, tokens: int, context: int) -> None:
        """The step is planned; of its only request it computes `tokens` after `context` others (0: it has several)."""
        self._step_tokens, self._step_context = tokens, context
        self._step_began, self._waited_s = time.monotonic(), 0.0

    def wait_for_layer(self, layer: int) -> None:
        """Before the attention of a layer: what the step loads of it is there, or given up."""
        for load, _, _ in self._loads:
            self._waited_s += load.wait(layer)

    def layer_computed(self) -> None:
        """After the attention of a layer: its KV is in the blocks."""
        if self._saves:
            mark = self._streams.mark_compute()
            for _, progress in self._saves:
                progress.layer_computed(mark)

    def end_step(self) -> set[int]:
        """The step has been computed; returns the device blocks whose KV did not arrive."""
        computed_s = time.monotonic() - self._step_began - self._waited_s
        if self._step_tokens >= LEAST_PREFILL_TOKENS:
            self._rates.add(("prefill", self._step_tokens, computed_s, self._step_context))
        self._step_tokens = 0
        failed: set[int] = set()
        failed_requests: set[str] = set()
        loads, self._loads = self._loads, []
        for load, group_bytes, on_end in loads:
            arrived = load.close()
            self.buffer.give(group_bytes)
            if missing := load.job.block_ids[arrived - load.job.first_block :]:
                failed.update(missing)
                failed_requests.add(load.job.request_id)
                if load.late_s:
                    self._rates.given_up(load.job.loads[0].tier, self._copier.block_bytes * len(missing), load.late_s)
            self._transfer.note_layerwise(load.job, load.nbytes, load.seconds, arrived)
            on_end(arrived)
        saves, self._saves = self._saves, []
        for request_id, progress in saves:
            progress.end(counts=request_id not in failed_requests)
        return failed
