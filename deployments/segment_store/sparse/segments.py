"""Sparse segments: made of a raw sealed one and the attention mass behind it, and opened to the tokens that were kept.

A sparse segment has the head of the segment it was made of: key, place, tenant, hashes and dense shape. Its codec is
`sparse`, its level names the budgets, its profile is that of the codec inside, and each section holds what one layer
keeps (`kernels.sparse.section`). There is no way from here to a dense segment: `open_sparse` gives `KeptLayer`s, and
every reader of dense segments refuses the codec.

The mass decides which tokens a sparse copy keeps. It is a raw segment's tail in the CPU tier; a segment without one is
never sparse. Pure functions: any thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from deployments.segment_store.segment_tail import TAIL_HEAD_BYTES, with_tail
from kernels.dtypes import DTYPES, Array
from kvmanager.segments.format import (
    Buffer,
    MismatchReason,
    SegmentHeader,
    SegmentLayers,
    SegmentMismatch,
    Shape,
    coded_body_offset,
    read_layers,
    seal,
)
from kvmanager.segments.keys import TOLERANT

if TYPE_CHECKING:
    from kernels.codecs import Codec
    from kernels.sparse.kept_layer import KeptLayer
    from kvmanager.extensions.sparse.budgets import Budgets

SPARSE: Final = "sparse"
"""Name of the codec in a header."""

InnerCodec = Callable[[str, int, bytes], "Codec | None"]
"""By name, level and digest of the profile; None for "raw". Raises ValueError where there is none such."""

Mass = np.ndarray[Any, np.dtype[np.float16]]
"""(layers, kv_heads, tokens), float16 behind a segment."""


def mass_bytes(layers: int, kv_heads: int, tokens: int) -> int:
    """What the mass of a segment takes behind it."""
    return TAIL_HEAD_BYTES + 2 * layers * kv_heads * tokens


def with_mass(sealed: np.ndarray[Any, np.dtype[np.uint8]], mass: Mass) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """A sealed raw segment with its mass behind it."""
    return with_tail(sealed, np.ascontiguousarray(mass, np.float16).tobytes())


def mass_of(content: memoryview, shape: Shape) -> Mass | None:
    """The mass that a tail holds, of a segment of this shape; None for a tail of another size."""
    layers, _, tokens, heads, _ = shape
    if len(content) != 2 * layers * heads * tokens:
        return None
    return np.frombuffer(content, np.float16).reshape(layers, heads, tokens)


def sparsified(
    sealed: Buffer, *, key: bytes, fingerprint: bytes, mass: Array, budgets: Budgets, inner: Codec | None
) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """The sparse segment of a raw sealed one; ``mass (layers, kv_heads, tokens)`` decides what is kept.

    Raises SegmentMismatch for what is not that raw segment, or no tolerant one: no other may lose anything. Raises
    ValueError for mass or budgets of another shape.
    """
    from kernels.sparse.kept_layer import (
        keep,
        kept_tokens,  # numba, by the codecs: not for a worker that stores raw only
    )
    from kernels.sparse.section import SparseForm

    layers = read_layers(sealed, key=key, fingerprint=fingerprint)
    header = layers.header
    if header.codec != "raw" or header.fidelity != TOLERANT:
        raise SegmentMismatch(MismatchReason.CODEC)
    count, _, tokens, heads, _ = header.shape
    if mass.shape != (count, heads, tokens) or len(budgets.shares) != count:
        raise ValueError(f"mass {mass.shape} and {len(budgets.shares)} budgets are not those of {header.shape}")
    form = SparseForm(inner)
    sections = []
    for number in range(count):
        kv = np.frombuffer(layers.layer(number), DTYPES[header.dtype]).reshape(header.shape[1:])
        kept = _kept_tokens(budgets, number, header)
        index = kept_tokens(mass[number], kept, min(budgets.recent, kept))
        sections.append(form.pack(number, keep(kv, index)))
    lengths = [len(section) for section in sections]
    start = coded_body_offset(count, header.num_blocks)
    buffer = np.empty(start + sum(lengths), np.uint8)
    np.concatenate(sections, out=buffer[start:])
    sparse = replace(
        header,
        codec=SPARSE,
        level=budgets.header_level,
        profile=form.profile,
        body_bytes=len(buffer) - header.head_bytes,
    )
    seal(buffer.data, sparse, lengths)
    return buffer


def open_sparse(
    buffer: Buffer,
    *,
    key: bytes,
    fingerprint: bytes,
    shape: Shape,
    dtype: str,
    num_blocks: int,
    budgets: Budgets,
    inner_codec: InnerCodec,
) -> Iterator[KeptLayer]:
    """The layers of a sparse segment, in order, each verified when its turn comes; ``shape`` is the dense one.

    Raises SegmentMismatch with the first thing that differs from what the caller expects, a dense segment and other
    budgets among it; what ``inner_codec`` raises for a store that cannot be asked.
    """
    from kernels.sparse.section import SparseForm, stated_inner

    layers = read_layers(buffer, key=key, fingerprint=fingerprint)
    header = layers.header
    checks = (
        (header.shape == tuple(shape) and header.num_blocks == num_blocks, MismatchReason.SHAPE),
        (header.dtype == dtype, MismatchReason.DTYPE),
        (header.codec == SPARSE and header.level == budgets.header_level, MismatchReason.CODEC),
        (len(budgets.shares) == header.shape[0], MismatchReason.CODEC),
    )
    for matches, reason in checks:
        if not matches:
            raise SegmentMismatch(reason)
    try:
        name, level = stated_inner(layers.layer(0))
        form = SparseForm(inner_codec(name, level, header.profile))
        if form.profile != header.profile:
            raise SegmentMismatch(MismatchReason.PROFILE)
    except ValueError:
        raise SegmentMismatch(MismatchReason.CODEC) from None
    return _kept_layers(layers, form, budgets)


def _kept_layers(layers: SegmentLayers, form: Any, budgets: Budgets) -> Iterator[KeptLayer]:
    header = layers.header
    for number in range(len(layers)):
        section = layers.layer(number)
        kept = _kept_tokens(budgets, number, header)
        try:
            yield form.unpack(number, section, header.shape[1:], kept, DTYPES[header.dtype])
        except ValueError:  # `kernels.errors.CodecError`, and a profile of another shape
            raise SegmentMismatch(MismatchReason.CODEC) from None


def _kept_tokens(budgets: Budgets, layer: int, header: SegmentHeader) -> int:
    return budgets.kept_blocks(layer, header.num_blocks) * (header.shape[2] // header.num_blocks)
