"""Copies between the engine's paged KV cache, or the states of its model, and sealed segments in memory.

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
from kernels.paged.layout import LayoutKind, PagedLayout
from kvmanager.moves.plan import PlannedLoad
from kvmanager.segments.format import (
    MismatchReason,
    SegmentHeader,
    SegmentLayers,
    SegmentMismatch,
    SegmentSealer,
    open_layers,
    seal,
    sealed_bytes,
)
from kvmanager.segments.sizes import BYTES, MOST_SEGMENT_BYTES
from kvmanager.segments.spans import SegmentSpan

# Stored segments are read-only, and so are the tensors made of them here: `scatter` only reads its source.
warnings.filterwarnings("ignore", message="The given (NumPy array|buffer) is not writable")

_DTYPE_NAMES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32", torch.uint8: BYTES}


NULL_BLOCK = 0
"""vLLM's device block in the place of one that a group of layers does not need any more, or never will."""


@dataclass(frozen=True)
class SegmentCopier:
    """Knows one replica's KV cache: `layers` are vLLM's per-layer tensors, in layer order.

    Layers of a model with windows lie in groups, each with device blocks of its own for the same blocks of a sequence:
    its methods then take `tables`, the device blocks by group, and look at no `block_ids`.
    """

    layers: Sequence[torch.Tensor]
    layout: PagedLayout
    fingerprint: bytes
    group_runs: Sequence[tuple[range, int]] = ()
    """Consecutive layers of one group, and its number, all layers in order; empty: there are no `tables`."""

    def warm_up(self) -> None:
        """Compile the copy kernels now, so that no request waits for it."""
        warm_up(self.layout)

    def sealed_bytes(self, num_blocks: int) -> int:
        """Bytes of a sealed segment of `num_blocks` blocks, head included."""
        return sealed_bytes(self._shape(num_blocks), _DTYPE_NAMES[self.layout.dtype], num_blocks)

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers."""
        return math.prod(self._shape(1)) * self.layout.dtype.itemsize

    def read(
        self,
        span: SegmentSpan,
        block_hashes: bytes,
        block_ids: Sequence[int],
        fidelity: str,
        tables: Sequence[Sequence[int]] = (),
    ) -> np.ndarray[Any, np.dtype[np.uint8]]:
        """The sealed segment of `span`, read from the device blocks `block_ids` (one per block of the span).

        `block_hashes` are those of its blocks, in order, together.
        """
        shape = self._shape(span.num_blocks)
        buffer = _aligned(self.sealed_bytes(span.num_blocks))
        header = self.header(span, block_hashes, fidelity)
        payload = torch.from_numpy(buffer)[header.body_offset :].view(self.layout.dtype).view(shape)
        for layers, ids in self._of_groups(block_ids, tables):
            gather(self.layers[layers.start : layers.stop], ids, self.layout, payload[layers.start : layers.stop])
        seal(buffer.data, header)
        return buffer

    def write(
        self,
        sealed: memoryview,
        load: PlannedLoad,
        skip_blocks: int,
        block_ids: Sequence[int],
        tables: Sequence[Sequence[int]] = (),
    ) -> None:
        """Write the blocks of a sealed segment that come after the first `skip_blocks` into `block_ids`.

        Of a group that begins with null blocks those are left out. What is written is verified, and nothing else is
        read. Raises SegmentMismatch when any byte of it, of the head or of the table is not what was stored under the
        load's key for this model; nothing is written then.
        """
        opened = self.open(sealed, load)
        parts: list[tuple[range, int, Sequence[int]]] = []
        for layers, ids in self._of_groups(block_ids, tables):
            nulls = next((at for at, block in enumerate(ids) if block != NULL_BLOCK), len(ids))
            parts.append((layers, skip_blocks + nulls, ids[nulls:]))
        for layers, skip, ids in parts:
            opened.verify(layers, skip, len(ids))
        for layers, skip, ids in parts:
            opened.scatter(layers, skip, ids)

    def open(self, sealed: memoryview, load: PlannedLoad) -> OpenSegment:
        """Verify head and table of a sealed segment, and that its blocks are those of the plan.

        Raises SegmentMismatch.
        """
        layers = open_layers(
            sealed,
            key=load.key,
            fingerprint=self.fingerprint,
            shape=self._shape(load.num_blocks),
            dtype=_DTYPE_NAMES[self.layout.dtype],
            num_blocks=load.num_blocks,
        )
        used = load.used_blocks or load.num_blocks
        if layers.header.block_hash(used - 1) != (load.last_hash or load.key):
            raise SegmentMismatch(MismatchReason.BLOCK_HASH)
        return OpenSegment(self, sealed, layers)

    def begin_read(
        self, span: SegmentSpan, block_hashes: bytes, block_ids: Sequence[int], fidelity: str
    ) -> SegmentRead:
        """Begin to read a sealed segment layer by layer; arguments as for `read`."""
        return SegmentRead(self, self.header(span, block_hashes, fidelity), block_ids)

    def header(self, span: SegmentSpan, block_hashes: bytes, fidelity: str) -> SegmentHeader:
        """The header of a segment of this model."""
        dtype = _DTYPE_NAMES[self.layout.dtype]
        return SegmentHeader.raw(span, block_hashes, self.fingerprint, self._shape(span.num_blocks), dtype, fidelity)

    def form_of(self, num_blocks: int) -> tuple[tuple[int, int, int, int, int], str]:
        """Return shape and dtype of a segment of `num_blocks` blocks, as in its header."""
        return self._shape(num_blocks), _DTYPE_NAMES[self.layout.dtype]

    def _of_groups(
        self, block_ids: Sequence[int], tables: Sequence[Sequence[int]]
    ) -> list[tuple[range, Sequence[int]]]:
        """Return consecutive layers with the device blocks that they have."""
        if not self.group_runs:
            return [(range(len(self.layers)), block_ids)]
        return [(layers, tables[group]) for layers, group in self.group_runs]

    def _shape(self, num_blocks: int) -> tuple[int, int, int, int, int]:
        return self.layout.segment_shape(len(self.layers), num_blocks)


class OpenSegment:
    """A stored segment whose head and table are verified, so that it can be written layer by layer."""

    def __init__(self, copier: SegmentCopier, sealed: memoryview, layers: SegmentLayers) -> None:
        self._layers = layers
        self._copier = copier
        self._sealed = sealed

    def write(self, layers: range, skip_blocks: int, block_ids: Sequence[int]) -> None:
        """Verify some consecutive layers, and write them as `SegmentCopier.write` does all.

        Raises SegmentMismatch when a byte of them is not what was stored; none of them is written then.
        """
        self.verify(layers, skip_blocks, len(block_ids))
        self.scatter(layers, skip_blocks, block_ids)

    def verify(self, layers: range, skip_blocks: int, num_blocks: int) -> None:
        """Verify some blocks of some layers. Raises SegmentMismatch."""
        for layer in layers:
            self._layers.blocks(layer, skip_blocks, skip_blocks + num_blocks)

    def scatter(self, layers: range, skip_blocks: int, block_ids: Sequence[int]) -> None:
        """Write some blocks of some consecutive layers, which the caller has verified."""
        if not block_ids:
            return
        values = self.values(layers, skip_blocks, len(block_ids)).contiguous()
        scatter(self._copier.layers[layers.start : layers.stop], block_ids, self._copier.layout, values)

    def values(self, layers: range, skip_blocks: int, num_blocks: int) -> torch.Tensor:
        """A view of some blocks of some consecutive layers, not to be written: as ``(layers, 2, token, head, dim)``."""
        header, layout = self._layers.header, self._copier.layout
        shape = layout.segment_shape(len(layers), header.num_blocks)
        count = math.prod(shape) * layout.dtype.itemsize
        offset = header.body_offset + count // len(layers) * layers.start
        values = torch.from_numpy(np.frombuffer(self._sealed, np.uint8, count, offset)).view(layout.dtype).view(shape)
        first = skip_blocks * layout.block_size
        return values[:, :, first : first + num_blocks * layout.block_size]


class SegmentRead:
    """A sealed segment in the making, layer by layer; `SegmentCopier.begin_read`. One thread at a time."""

    def __init__(self, copier: SegmentCopier, header: SegmentHeader, block_ids: Sequence[int]) -> None:
        layout = copier.layout
        self._copier = copier
        self._block_ids = block_ids
        self._buffer = _aligned(header.sealed_bytes)
        self._sealer = SegmentSealer(self._buffer.data, header)
        body = torch.from_numpy(self._buffer)[header.body_offset :]
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


def state_pages(states: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the pages of a layer's states as bytes, ``(blocks, 1, 1, page bytes)``: the same memory.

    vLLM gives a layer's states as tensors (convolution, recurrence) that are views of one page a block. What is stored
    is the page as it is, its unused end too: its reader has the same model, shapes and types, which are in the
    fingerprint. Leans on vLLM: the layers that it registers with a connector, one tensor or several with the same block
    numbers.

    Raises ValueError where its tensors do not lie in pages of one size.
    """
    parts = [states] if isinstance(states, torch.Tensor) else list(states)
    first = min(parts, key=lambda part: part.data_ptr())
    blocks, page = first.shape[0], first.stride(0) * first.element_size()
    storage = first.untyped_storage()
    offset = first.data_ptr() - storage.data_ptr()
    for part in parts:
        same = part.shape[0] == blocks and part.stride(0) * part.element_size() == page
        begins = part.data_ptr() - first.data_ptr()
        used = sum((size - 1) * step for size, step in zip(part.shape[1:], part.stride()[1:], strict=True)) + 1
        if not same or part.untyped_storage().data_ptr() != storage.data_ptr():
            raise ValueError("a layer's states do not lie in pages of one size")
        if begins + used * part.element_size() > page:
            raise ValueError("a layer's states reach beyond their page")
    if page % 2 or offset + blocks * page > storage.nbytes():
        raise ValueError(f"a layer's states lie in pages of {page} bytes, which cannot be moved")
    pages = torch.empty(0, dtype=torch.uint8, device=first.device)
    return pages.set_(storage, offset, (blocks, 1, 1, page), (page, page, page, 1))


def state_copier(
    layers: Sequence[torch.Tensor | Sequence[torch.Tensor]], runs: Sequence[tuple[range, int]], fingerprint: bytes
) -> SegmentCopier:
    """Return what copies the states of all layers at one boundary, by ``runs`` of layers of one group.

    Raises ValueError as `state_pages`, where the layers' pages differ in size, and where a segment cannot hold them.
    """
    pages = [state_pages(layer) for layer in layers]
    sizes = {each.shape[-1] for each in pages}
    if len(sizes) != 1:
        raise ValueError("the layers' states lie in pages of several sizes")
    layout = PagedLayout(LayoutKind.OPAQUE, 1, 1, sizes.pop() // 2, torch.uint8)
    copier = SegmentCopier(pages, layout, fingerprint, runs)
    if copier.sealed_bytes(1) > MOST_SEGMENT_BYTES:
        raise ValueError(
            f"the model's states at one place are a segment of {copier.sealed_bytes(1) >> 20} MiB, more than the "
            f"{MOST_SEGMENT_BYTES >> 20} MiB that can be stored"
        )
    return copier
