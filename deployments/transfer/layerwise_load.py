"""One request's load, layer by layer: a load thread writes what arrives while the engine's thread computes.

Life:  begun → layers written as they arrive, while the engine waits before each layer that it needs → closed

The load brings a number of consecutive segments. A segment that does not come, is not what was stored, or is late when
the engine needs a layer of it, is lost with all that follow it: the engine no longer waits for them, the step computes
on with whatever lies in their blocks, and vLLM is told to discard the request's part of the step and to compute those
tokens. After `close` nothing is written: the blocks are the engine's alone.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from deployments.protocol.kv_port import KVPort, LayerArrival
from deployments.transfer.jobs import LoadJob, LoadPart
from deployments.transfer.layerwise_times import LayerTimes
from kvmanager.moves.plan import PlannedLoad
from kvmanager.segments.format import SegmentMismatch

if TYPE_CHECKING:
    from deployments.transfer.layerwise_streams import TransferStreams
    from deployments.transfer.segment_copy import OpenSegment, SegmentCopier

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Part:
    """What the load writes of one segment, to `block_ids`."""

    of: LoadPart
    block_ids: Sequence[int]
    opened: OpenSegment | None = None
    layers: int = 0
    """Number of leading layers that have been written."""


class LayerwiseLoad:
    """See the module's docstring. `run` on a load thread, which also tells a mismatch; all else on the engine's."""

    def __init__(
        self,
        job: LoadJob,
        copier: SegmentCopier,
        group_ends: Sequence[int],
        deadline: float,
        streams: TransferStreams,
        times: LayerTimes,
        on_mismatch: Callable[[PlannedLoad, SegmentMismatch], None],
    ) -> None:
        """`deadline`, on `time.monotonic`'s clock, is for the whole load."""
        self.job = job
        self.nbytes = 0
        """Read for the segments of which all is written."""
        self.seconds = 0.0
        """Until the last layer of all segments was written; 0 when that has not happened."""
        self.late_s = 0.0
        """Seconds after which the engine has given up waiting; 0: it has not."""
        self._copier = copier
        self._group_ends = group_ends
        self._deadline = deadline
        self._streams = streams
        self._times = times
        self._on_mismatch = on_mismatch
        self._parts = [_Part(part, job.ids_of(part)) for part in job.parts]
        self._wanted = len(self._parts)
        self._ready = 0
        self._last_behind = max(0, len(self._parts) - 1)
        """The last segment of which no more layers have been written than are ready."""
        self._awaited = 0
        self._marks: list[tuple[int, Any]] = []
        self._closed = False
        self._writing = threading.Lock()
        """Held while blocks are written, so that `close` can wait for the end of a write."""
        self._changed = threading.Condition()
        """Guards what is counted; never held while bytes are moved, for the engine's thread takes it."""
        self._began = self._last = time.monotonic()
        self._computed = streams.mark_compute()

    def run(self, port: KVPort) -> None:
        """Write what arrives until all has, or the rest is not wanted."""
        try:
            arrivals = port.fetch_layers(self.job.loads, self._group_ends, self._deadline)
            with contextlib.closing(arrivals):  # type: ignore[type-var]
                for arrival in arrivals:
                    if not self._take(arrival):
                        break
        except Exception:
            logger.exception("layerwise load of %s failed; its tokens are recomputed", self.job.request_id)
        with self._changed:
            self._lose(self._first_without(len(self._copier.layers)))

    def wait(self, layer: int) -> float:
        """Return, in seconds waited, when a layer of all segments that are not lost has been written."""
        self._awaited += 1
        waited = 0.0
        if self._ready <= layer:
            began = time.monotonic()
            with self._changed:
                while self._ready <= layer:
                    left = self._deadline - time.monotonic()
                    if left <= 0:
                        self.late_s = self.late_s or time.monotonic() - self._began
                        self._lose(self._first_without(layer + 1))
                    else:
                        self._changed.wait(left)
            waited = time.monotonic() - began
        self._times.waited(layer, waited)
        for upto, mark in self._marks:
            if upto > layer:
                self._streams.compute_awaits(mark)
                break
        return waited

    def close(self) -> int:
        """End the load; return the first block of the sequence that did not arrive.

        A step that has not waited for every layer may have computed with what was not there yet: nothing counts then.
        """
        with self._writing:
            self._closed = True
        with self._changed:
            layers = len(self._copier.layers)
            arrived = min(self._wanted, self._first_without(layers)) if self._awaited == layers else 0
            self._wanted = arrived
            return self._parts[arrived - 1].of.end_block if arrived else self.job.first_block

    def _take(self, arrival: LayerArrival) -> bool:
        """Verify and write an arrival; returns whether more is wanted."""
        part = self._parts[arrival.segment]
        with self._writing:
            if self._closed:
                return False
            if arrival.segment < self._wanted:
                try:
                    written = arrival.sealed is not None and self._write(part, arrival.sealed, arrival.layers)
                except SegmentMismatch as mismatch:
                    self._on_mismatch(part.of.load, mismatch)
                    written = False
                with self._changed:
                    if written:
                        self._note_written(part, arrival)
                    else:
                        self._lose(arrival.segment)
        return self._wanted > 0

    def _write(self, part: _Part, sealed: memoryview, upto: int) -> bool:
        if part.opened is None:
            part.opened = self._copier.open(sealed, part.of.load)
        if part.block_ids and upto > part.layers:
            with self._streams.loading(self._computed):
                part.opened.write(range(part.layers, upto), part.of.skip_blocks, part.block_ids)
        return True

    def _note_written(self, part: _Part, arrival: LayerArrival) -> None:
        """Under `_changed`."""
        part.layers = max(part.layers, arrival.layers)
        if part.layers == len(self._copier.layers) and arrival.sealed is not None:
            self.nbytes += part.of.nbytes
        self._update()

    def _lose(self, segment: int) -> None:
        """A segment and all after it will not be there. Under `_changed`."""
        self._wanted = min(self._wanted, segment)
        self._update()

    def _update(self) -> None:
        """See which layers are ready now. Under `_changed`."""
        behind = self._last_behind
        if behind < self._wanted and self._parts[behind].layers == self._ready:
            return  # so that each group of layers looks at all segments once, and not each arrival: they come in order
        layers = len(self._copier.layers)
        ready = min((part.layers for part in self._parts[: self._wanted]), default=layers)
        numbers = reversed(range(self._wanted))
        self._last_behind = next((number for number in numbers if self._parts[number].layers == ready), 0)
        if ready > self._ready:
            now = time.monotonic()
            if self._wanted:
                self._times.loaded(range(self._ready, ready), now - self._last)
                self._marks.append((ready, self._streams.mark_load()))
            if ready == layers and self._wanted == len(self._parts):
                self.seconds = now - self._began
            self._ready, self._last = ready, now
            self._changed.notify_all()

    def _first_without(self, layers: int) -> int:
        """Return the first segment with fewer than `layers` layers. Under `_changed`."""
        return next((n for n, part in enumerate(self._parts) if part.layers < layers), len(self._parts))
