"""Copies between the engine's paged KV cache and sealed segments in memory.

Used from the transfer threads while the engine thread computes: a copy reads or writes only blocks that the connector
holds for it, so no lock is needed. One copy per byte in each direction; verification reads each byte once more.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from kernels.layout import PagedLayout
from kernels.paged import gather, scatter, warm_up
from kvmanager.segment_format import HEADER_BYTES, SegmentHeader, open_segment, seal
from kvmanager.segments import SegmentSpan

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
        layers, kinds, tokens, heads, dim = self._shape(num_blocks)
        return HEADER_BYTES + layers * kinds * tokens * heads * dim * self.layout.dtype.itemsize

    def read(self, span: SegmentSpan, block_ids: Sequence[int]) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The sealed segment of `span`, read from the device blocks `block_ids` (one per block of the span)."""
        shape = self._shape(len(block_ids))
        buffer = np.empty(self.sealed_bytes(len(block_ids)), dtype=np.uint8)
        payload = torch.from_numpy(buffer)[HEADER_BYTES:].view(self.layout.dtype).view(shape)
        gather(self.layers, block_ids, self.layout, payload)
        header = SegmentHeader(
            key=span.key,
            fingerprint=self.fingerprint,
            shape=shape,
            dtype=_DTYPE_NAMES[self.layout.dtype],
            codec="raw",
            payload_bytes=buffer.nbytes - HEADER_BYTES,
            parent=span.parent,
            start_block=span.start_block,
            num_blocks=span.num_blocks,
            kind=span.kind,
        )
        seal(buffer.data, header)
        return buffer

    def write(
        self, sealed: memoryview, key: bytes, num_blocks: int, skip_blocks: int, block_ids: Sequence[int]
    ) -> None:
        """Verify a sealed segment of `num_blocks` blocks; write those after the first `skip_blocks` into `block_ids`.

        `block_ids` may be fewer than the segment has left; the rest is not written.

        Raises SegmentMismatch when any byte is not what was stored under `key` for this model; nothing is written then.
        """
        shape = self._shape(num_blocks)
        payload = open_segment(
            sealed, key=key, fingerprint=self.fingerprint, shape=shape, dtype=_DTYPE_NAMES[self.layout.dtype]
        )
        values = torch.from_numpy(np.frombuffer(payload, dtype=np.uint8)).view(self.layout.dtype).view(shape)
        if len(block_ids) < num_blocks:
            first = skip_blocks * self.layout.block_size
            values = values[:, :, first : first + len(block_ids) * self.layout.block_size].contiguous()
        scatter(self.layers, block_ids, self.layout, values)

    def _shape(self, num_blocks: int) -> tuple[int, int, int, int, int]:
        return self.layout.segment_shape(len(self.layers), num_blocks)
