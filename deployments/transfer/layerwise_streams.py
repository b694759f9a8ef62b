"""Streams and events of transfer: which copy may run in parallel with which computation.

On the CPU backend a copy is over when its call returns, and the thread that computes waits for the one that copies
(`HostStreams` has nothing to do). On CUDA copies are enqueued on streams of their own, one for loads and one for
stores, and order is kept by events. Layerwise, they hold up a stream and never the engine's thread; a load outside the
engine's step is awaited by its own thread (`await_loads`). `torch.cuda.synchronize` is not called.

A *mark* stands for all that was enqueued before it. Marks may be made on one thread and awaited on another.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch


class TransferStreams(Protocol):
    """See the module's docstring. `mark_compute` and `compute_awaits` belong to the thread that computes."""

    def loading(self, after: Any) -> AbstractContextManager[Any]:
        """Start copies to the device after the mark `after`, parallel to computation. On the thread that copies."""
        ...

    def storing(self, after: Any) -> AbstractContextManager[Any]:
        """Start copies from the device after the mark `after`, parallel to computation. On the thread that copies."""
        ...

    def mark_load(self) -> Any:
        """A mark of the copies to the device so far."""
        ...

    def mark_compute(self) -> Any:
        """A mark of the computation so far."""
        ...

    def compute_awaits(self, mark: Any) -> None:
        """What is computed from now on begins after a mark of copies."""
        ...

    def await_loads(self) -> None:
        """Return when the copies to the device so far have been made: they may be read now, on any stream."""
        ...

    def await_stores(self) -> None:
        """Return when the copies from the device so far have been made: their bytes are about to be read."""
        ...


class HostStreams:
    """For tensors in host memory: a copy is over when its call returns."""

    def loading(self, after: Any) -> AbstractContextManager[Any]:
        """Nothing to do."""
        return nullcontext()

    def storing(self, after: Any) -> AbstractContextManager[Any]:
        """Nothing to do."""
        return nullcontext()

    def mark_load(self) -> Any:
        """Nothing to do."""

    def mark_compute(self) -> Any:
        """Nothing to do."""

    def compute_awaits(self, mark: Any) -> None:
        """Nothing to do."""

    def await_loads(self) -> None:
        """Nothing to do."""

    def await_stores(self) -> None:
        """Nothing to do."""


class CUDAStreams:
    """For tensors on one CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._load = torch.cuda.Stream(device)
        self._store = torch.cuda.Stream(device)

    def loading(self, after: torch.cuda.Event) -> AbstractContextManager[Any]:
        """The blocks that are written may have been read by what was computed before `after`."""
        self._load.wait_event(after)
        return torch.cuda.stream(self._load)

    def storing(self, after: torch.cuda.Event) -> AbstractContextManager[Any]:
        """What is copied has been computed at `after`."""
        self._store.wait_event(after)
        return torch.cuda.stream(self._store)

    def mark_load(self) -> torch.cuda.Event:
        """An event on the load stream."""
        return self._load.record_event()

    def mark_compute(self) -> torch.cuda.Event:
        """An event on the current stream of the calling thread."""
        return torch.cuda.current_stream(self._device).record_event()

    def compute_awaits(self, mark: torch.cuda.Event) -> None:
        """The current stream of the calling thread waits; the thread does not."""
        torch.cuda.current_stream(self._device).wait_event(mark)

    def await_loads(self) -> None:
        """The calling thread, which only loads, waits for one event."""
        self._load.record_event().synchronize()

    def await_stores(self) -> None:
        """The calling thread, which only saves, waits for one event."""
        self._store.record_event().synchronize()


def streams_for(layer: torch.Tensor) -> TransferStreams:
    """The streams for a KV cache of which `layer` is one layer."""
    return CUDAStreams(layer.device) if layer.is_cuda else HostStreams()
