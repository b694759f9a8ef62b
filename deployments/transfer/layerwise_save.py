"""Saving a layer while the engine computes the next ones: how far the step is, and how much host memory may be used.

Life of a layerwise save:  begun with its step → granted → each layer copied once it is computed → the step counts, or
the save is dropped → sealed → blocks given back → stored

A step counts for a request unless a layerwise load of it failed: then its KV was computed from what was not there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deployments.transfer.layerwise_streams import TransferStreams
    from deployments.transfer.segment_copy import SegmentRead

LONGEST_STEP_S = 60.0
"""A save does not wait longer for the engine's step: the engine has died."""


class StepDiscardedError(Exception):
    """The KV that the step has computed for the request does not count."""


class HostBuffer:
    """Bounds the host memory of layerwise transfers. Any thread."""

    def __init__(self, nbytes: int) -> None:
        self._lock = threading.Lock()
        self._free = nbytes

    @property
    def free_bytes(self) -> int:
        """Bytes that can be taken now."""
        return self._free

    def take(self, nbytes: int) -> bool:
        """Take `nbytes`, or nothing."""
        with self._lock:
            taken = nbytes <= self._free
            self._free -= nbytes if taken else 0
            return taken

    def give(self, nbytes: int) -> None:
        """Give back what was taken."""
        with self._lock:
            self._free += nbytes


class StepProgress:
    """How far the engine is with a step. `layer_computed` and `end` on its thread, `copy` on the save thread."""

    def __init__(self, layers: int, streams: TransferStreams) -> None:
        self._layers = layers
        self._streams = streams
        self._marks: list[Any] = []
        self._counts: bool | None = None
        self._changed = threading.Condition()

    def layer_computed(self, mark: Any) -> None:
        """The next layer's KV is in the device's blocks, at this mark of the computation."""
        with self._changed:
            self._marks.append(mark)
            self._changed.notify_all()

    def end(self, counts: bool) -> None:
        """The step has been computed."""
        with self._changed:
            self._counts = counts and len(self._marks) == self._layers
            self._changed.notify_all()

    def copy(self, reads: Sequence[SegmentRead]) -> None:
        """Copy each layer when it is computed; returns when the step counts. Raises StepDiscardedError when not."""
        for layer in range(self._layers):
            with self._streams.storing(self._mark(layer)):
                for read in reads:
                    read.copy(layer)
            self._streams.await_stores()
            for read in reads:
                read.seal_layer()
        self._await_change(lambda: self._counts is not None)

    def _mark(self, layer: int) -> Any:
        self._await_change(lambda: len(self._marks) > layer)
        return self._marks[layer]

    def _await_change(self, holds: Any) -> None:
        deadline = time.monotonic() + LONGEST_STEP_S
        with self._changed:
            while not holds() and self._counts is None:
                if not self._changed.wait(max(0.0, deadline - time.monotonic())):
                    raise StepDiscardedError
            if self._counts is False:
                raise StepDiscardedError
