"""A layer of a sparse segment as bytes, and back: which tokens are kept, then their K and V, coded further or not.

A section is ``codec u8, level u8, zero u16, kept u32``, then for each KV head a bit per token of the segment (1: kept;
the first token is the lowest bit of the first byte), then the kept K and V as one layer ``(2, kept, kv_heads,
head_dim)``, raw or as the *inner* codec of `kernels.codecs` writes it. Where all tokens are kept there are no bits. The
bits are a quarter of a byte per kept token where half of 256 are kept, and can only state an ascending index.

The inner codec's anchors run along the kept tokens of each head: a shorter sequence. Decoding any bytes ends in a
`KeptLayer` or in a `CodecError`; nothing is allocated by what the bytes say. Any thread.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from kernels.codecs.base import Bytes, Codec, SectionReader, Shape, bytes_of
from kernels.dtypes import Array, bits_of
from kernels.errors import CodecError
from kernels.sparse.kept_layer import MOST_TOKENS, Index, KeptLayer

_PRELUDE = struct.Struct("<BBHI")
INNER = {"raw": 0, "lossless": 1, "cachegen": 4}
"""Codes in a section: a segment header's own."""
_NAMES = {code: name for name, code in INNER.items()}


class SparseForm:
    """Packs and unpacks sections with one inner codec; None: kept K and V as they are. Stateless; any thread.

    It is no `Codec`: there is no ``out`` that it could fill, for what was dropped is gone.
    """

    name = "sparse"

    def __init__(self, inner: Codec | None = None) -> None:
        self._inner = inner
        self._coded_as = (INNER[inner.name], inner.level) if inner is not None else (INNER["raw"], 0)

    @property
    def profile(self) -> bytes:
        """Digest of the inner codec's profile; empty without one."""
        return self._inner.profile if self._inner is not None else b""

    def pack(self, layer: int, kept: KeptLayer) -> Bytes:
        """The section of layer number ``layer``."""
        kv = np.stack((kept.keys, kept.values))
        content = bytes_of(bits_of(kv)) if self._inner is None else self._inner.encode(layer, kv)
        prelude = np.frombuffer(_PRELUDE.pack(*self._coded_as, 0, len(kept.keys)), np.uint8)
        bits = np.empty(0, np.uint8) if len(kept.keys) == kept.tokens else _bits(kept.index, kept.tokens)
        return np.concatenate((prelude, bits, content))

    def unpack(self, layer: int, section: bytes | memoryview | Bytes, shape: Shape, kept: int, dtype: Any) -> KeptLayer:
        """The layer of a segment of dense ``shape (2, tokens, kv_heads, head_dim)``, of which ``kept`` are expected.

        Raises CodecError for another inner codec, level or number of tokens than expected, and for bytes that no layer
        packs to; ValueError for an expectation that no section can meet.
        """
        halves, tokens, heads, dim = shape
        if halves != 2 or min(heads, dim) < 1 or not 1 <= kept <= tokens <= MOST_TOKENS:
            raise ValueError(f"{kept} tokens cannot be kept of a layer {shape}")
        reader = SectionReader(section)
        code, level, zero, stated = reader.fields(_PRELUDE)
        if (code, level) != self._coded_as or zero:
            raise CodecError(f"kept KV coded as {_NAMES.get(code, code)} {level}, expected {self._coded_as}")
        if stated != kept:
            raise CodecError(f"{stated} tokens are kept where the budget says {kept}")
        if kept == tokens:
            index = np.tile(np.arange(tokens, dtype=np.uint16), (heads, 1))
        else:
            index = _index(reader.take(heads * _bytes_per_head(tokens)), heads, tokens, kept)
        kv = np.empty((2, kept, heads, dim), dtype)
        if self._inner is None:
            raw = bytes_of(bits_of(kv))
            raw[:] = reader.take(len(raw))
            reader.end()
        else:
            self._inner.decode(layer, reader.rest(), kv)
        return KeptLayer(kv[0], kv[1], index, tokens)


def stated_inner(section: bytes | memoryview | Bytes) -> tuple[str, int]:
    """Name and level of the inner codec that a verified section states, "raw" for none. Raises CodecError."""
    code, level, zero, _ = SectionReader(section).fields(_PRELUDE)
    if code not in _NAMES or zero:
        raise CodecError(f"kept KV is coded in an unknown way: {code}")
    return _NAMES[code], level


def _bytes_per_head(tokens: int) -> int:
    return -(-tokens // 8)


def _bits(index: Index, tokens: int) -> Bytes:
    """(kv_heads · bytes,), a bit per token."""
    marks = np.zeros((len(index), tokens), np.uint8)
    np.put_along_axis(marks, index.astype(np.int64), 1, axis=1)
    return np.packbits(marks, axis=1, bitorder="little").reshape(-1)


def _index(bits: Array, heads: int, tokens: int, kept: int) -> Index:
    """Return each head's kept tokens; raise CodecError unless each head keeps ``kept``, none beyond ``tokens``."""
    marks = np.unpackbits(bits.reshape(heads, -1), axis=1, bitorder="little")
    if marks[:, tokens:].any() or (marks.sum(1, dtype=np.int64) != kept).any():
        raise CodecError(f"a head does not keep {kept} of its {tokens} tokens")
    index: Index = np.nonzero(marks)[1].reshape(heads, kept).astype(np.uint16)
    return index
