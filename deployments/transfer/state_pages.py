"""The states of a model as bytes: a block of a layer is one page, whatever lies in it.

vLLM gives a layer's states as tensors (convolution, recurrence) that are views of one page a block. What is stored is
the page as it is, its unused end too: its reader has the same model, shapes and types, which are in the fingerprint.

Leans on vLLM: the layers that it registers with a connector, one tensor or several with the same block numbers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deployments.transfer.segment_copy import SegmentCopier
from kernels.paged.layout import LayoutKind, PagedLayout
from kvmanager.segments.sizes import MOST_SEGMENT_BYTES


def state_pages(states: torch.Tensor | Sequence[torch.Tensor]) -> torch.Tensor:
    """Return a layer's pages as bytes, ``(blocks, 1, 1, page bytes)``: the same memory.

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
