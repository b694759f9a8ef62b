"""Copies between the engine's paged KV cache and sealed segments in memory.

Used from the transfer threads while the engine thread computes: a copy reads or writes only blocks that the connector
holds for it, so no lock is needed. One copy per byte in each direction; verification reads each byte once more.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kernels.paged.cpu import LINE_BYTES
from kernels.paged.gather_scatter import gather, scatter, warm_up
from kernels.paged.layout import PagedLayout
from kvmanager.segments.format import (
    EXACT,
    SegmentHeader,
    SegmentLayers,
    SegmentSealer,
    body_offset,
    open_layers,
    seal,
    sealed_bytes,
)
from kvmanager.segments.spans import SegmentSpan

# Stored segments are read-only, and so are the tensors made of them here: `scatter` only reads its source.
warnings.filterwarnings("ignore", message="The given (NumPy array|buffer) is not writable")

_DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}


@dataclass(frozen=True)
class SegmentCopier:
    """Knows one replica's KV cache: `layers` are vLLM's per-layer tensors, in layer order."""

    layers: Sequence[torch.Tensor]
    layout: PagedLayout
    fingerprint: bytes

    def warm_up(self) -> None:
        """Compile the copy kernels now, so that no request waits for it."""
        warm_up(self.layout)

    def sealed_bytes(self, num_blocks: int) -> int:
        """Bytes of a sealed segment of `num_blocks` blocks, header included."""
        return sealed_bytes(self._shape(num_blocks), _DTYPE_NAMES[self.layout.dtype])

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return math.prod(self._shape(1)) * self.layout.dtype.itemsize

    def read(
        self, span: SegmentSpan, block_ids: Sequence[int], fidelity: str = EXACT
    ) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The sealed segment of `span`, read from the device blocks `block_ids` (one per block of the span)."""
        shape = self._shape(len(block_ids))
        buffer = _aligned(self.sealed_bytes(len(block_ids)))
        payload = torch.from_numpy(buffer)[body_offset(len(self.layers)) :].view(self.layout.dtype).view(shape)
        gather(self.layers, block_ids, self.layout, payload)
        seal(buffer.data, self.header(span, len(block_ids), fidelity))
        return buffer

    def write(
        self, sealed: memoryview, key: bytes, num_blocks: int, skip_blocks: int, block_ids: Sequence[int]
    ) -> None:
        """Verify a sealed segment of `num_blocks` blocks; write those after the first `skip_blocks` into `block_ids`.

        `block_ids` may be fewer than the segment has left; the rest is not written.

        Raises SegmentMismatch when any byte is not what was stored under `key` for this model; nothing is written then.
        """
        opened = self.open(sealed, key, num_blocks)
        opened.layers.verify()
        opened.scatter(range(len(self.layers)), skip_blocks, block_ids)

    def open(self, sealed: memoryview, key: bytes, num_blocks: int) -> OpenSegment:
        """Verify header and table of a sealed segment of `num_blocks` blocks. Raises SegmentMismatch."""
        shape, dtype = self._shape(num_blocks), _DTYPE_NAMES[self.layout.dtype]
        layers = open_layers(sealed, key=key, fingerprint=self.fingerprint, shape=shape, dtype=dtype)
        return OpenSegment(self, sealed, layers, num_blocks)

    def begin_read(self, span: SegmentSpan, block_ids: Sequence[int], fidelity: str = EXACT) -> SegmentRead:
        """Begin to read a sealed segment layer by layer; arguments as for `read`."""
        return SegmentRead(self, span, block_ids, fidelity)

    def header(self, span: SegmentSpan, num_blocks: int, fidelity: str) -> SegmentHeader:
        """The header of a segment of this model."""
        dtype = _DTYPE_NAMES[self.layout.dtype]
        return SegmentHeader.raw(span, self.fingerprint, self._shape(num_blocks), dtype, fidelity)

    def _shape(self, num_blocks: int) -> tuple[int, int, int, int, int]:
        return self.layout.segment_shape(len(self.layers), num_blocks)


class OpenSegment:
    """A stored segment whose header and table are verified, so that it can be written layer by layer."""

    def __init__(self, copier: SegmentCopier, sealed: memoryview, layers: SegmentLayers, num_blocks: int) -> None:
        self.layers = layers
        self._copier = copier
        self._sealed = sealed
        self._num_blocks = num_blocks

    def write(self, layers: range, skip_blocks: int, block_ids: Sequence[int]) -> None:
        """Verify some consecutive layers, and write them as `SegmentCopier.write` does all.

        Raises SegmentMismatch when a byte of them is not what was stored; none of them is written then.
        """
        for layer in layers:
            self.layers.layer(layer)
        self.scatter(layers, skip_blocks, block_ids)

    def scatter(self, layers: range, skip_blocks: int, block_ids: Sequence[int]) -> None:
        """Write some consecutive layers, which the caller has verified."""
        layout = self._copier.layout
        shape = layout.segment_shape(len(layers), self._num_blocks)
        count = math.prod(shape) * layout.dtype.itemsize
        offset = body_offset(len(self.layers)) + count // len(layers) * layers.start
        values = torch.from_numpy(np.frombuffer(self._sealed, np.uint8, count, offset)).view(layout.dtype).view(shape)
        if len(block_ids) < self._num_blocks:
            first = skip_blocks * layout.block_size
            values = values[:, :, first : first + len(block_ids) * layout.block_size].contiguous()
        scatter(self._copier.layers[layers.start : layers.stop], block_ids, layout, values)


class SegmentRead:
    """A sealed segment in the making, layer by layer; `SegmentCopier.begin_read`. One thread at a time."""

    def __init__(self, copier: SegmentCopier, span: SegmentSpan, block_ids: Sequence[int], fidelity: str) -> None:
        layout = copier.layout
        self._copier = copier
        self._block_ids = block_ids
        self._buffer = _aligned(copier.sealed_bytes(len(block_ids)))
        self._sealer = SegmentSealer(self._buffer.data, copier.header(span, len(block_ids), fidelity))
        body = torch.from_numpy(self._buffer)[body_offset(len(copier.layers)) :]
        self._payload = body.view(layout.dtype).view(layout.segment_shape(len(copier.layers), len(block_ids)))

    def copy(self, layer: int) -> None:
        """Copy a layer from its blocks; layers in order."""
        gather(self._copier.layers[layer : layer + 1], self._block_ids, self._copier.layout, self._payload[layer:][:1])

    def seal_layer(self) -> None:
        """Checksum the next layer, whose copy has been made, while it is in the cache."""
        self._sealer.add()

    def finish(self) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The sealed segment, when all layers are copied."""
        self._sealer.finish()
        return self._buffer


def _aligned(nbytes: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A buffer that begins with a cache line, and so does a body in it: `gather` streams to such places only."""
    room = np.empty(nbytes + LINE_BYTES, dtype=np.uint8)
    skip = -room.ctypes.data % LINE_BYTES
    return room[skip : skip + nbytes]
