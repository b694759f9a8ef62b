"""Interface of every codec, and the reader of its bytes.

A codec turns one layer of a segment, ``kv (2, tokens, kv_heads, head_dim)``, into a *section* of bytes and back. One of
latents is ``(1, tokens, 1, width)``, which only the lossless codec takes.
Sections know nothing of each other, so that a layer can be read, moved and decoded by itself. A section does not repeat
what the segment's header says (shape, dtype, codec, level, profile): a decoder takes those from ``out``, and every
length that a section states is held against them before anything is allocated by it.

Layers are arrays of `kernels.dtypes`. Encoding raises ValueError for one that is not such a layer. Decoding raises
`kernels.errors.CodecError` for bytes that ``encode`` cannot have written, or fills ``out`` with something: whether
these were the bytes that were stored is for the checksum to say. Both take one thread, the caller's, and may run on
several at once: a codec holds no state.
"""

import struct
from typing import Any, Protocol

import numpy as np

from kernels.dtypes import DTYPES, Array
from kernels.errors import CodecError

Shape = tuple[int, int, int, int]
"""(2, tokens, kv_heads, head_dim): one layer; (1, tokens, 1, width) of latents."""

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Codec(Protocol):
    """One way to store a layer of KV."""

    @property
    def name(self) -> str:
        """Its name in settings and headers."""

    @property
    def level(self) -> int:
        """1 (fine) and up for a codec that has levels, else 0."""

    @property
    def lossy(self) -> bool:
        """Whether decoding gives other values than were encoded."""

    @property
    def profile(self) -> bytes:
        """Digest (16 bytes) of the profile that both sides must hold; empty without one."""

    @property
    def generic(self) -> bool:
        """Whether a profile is in use that was not measured on this model; the caller logs it."""

    def encode(self, layer: int, kv: Array) -> Bytes:
        """The section of layer number ``layer``; ``kv`` is contiguous, in one of `DTYPES`."""

    def decode(self, layer: int, coded: bytes | memoryview | Bytes, out: Array) -> None:
        """Fill ``out``, which has the shape and dtype that were encoded. Raises CodecError."""

    def bound(self, shape: Shape, dtype: np.dtype[Any]) -> int:
        """The most bytes that ``encode`` returns for a layer of this shape."""


def check_layer(kv: Array, *, latents: bool = False) -> None:
    """Raise ValueError for anything but one layer of KV, or, with ``latents``, of these."""
    halves = (1, 2) if latents else (2,)
    if kv.ndim != 4 or kv.shape[0] not in halves or kv.size == 0 or kv.dtype not in DTYPES.values():
        raise ValueError(f"a layer is (2, tokens, kv_heads, head_dim) of floats, got {kv.shape} of {kv.dtype}")
    if not kv.flags.c_contiguous:
        raise ValueError("codecs work on contiguous arrays; copy the layer first")


def check_number(layer: int, layers: int) -> None:
    """Raise ValueError for a layer that the profile does not have."""
    if not 0 <= layer < layers:
        raise ValueError(f"the profile has layers 0 to {layers - 1}, not {layer}")


def raw_bytes(shape: Shape, dtype: np.dtype[Any]) -> int:
    """Bytes of a layer that is not encoded."""
    return int(np.prod(shape, dtype=np.int64)) * dtype.itemsize


def bytes_of(array: Array) -> Bytes:
    """The memory of a contiguous array."""
    return array.reshape(-1).view(np.uint8)


class SectionReader:
    """Takes a section apart from the front. Never reads past its end, and ends it exactly."""

    def __init__(self, coded: bytes | memoryview | Bytes) -> None:
        self._left: Bytes = np.frombuffer(coded, dtype=np.uint8)

    def take(self, nbytes: int) -> Bytes:
        """The next ``nbytes``, without a copy."""
        if nbytes > len(self._left):
            raise CodecError(f"the section ends {nbytes - len(self._left)} bytes early")
        taken, self._left = self._left[:nbytes], self._left[nbytes:]
        return taken

    def fields(self, layout: struct.Struct) -> tuple[int, ...]:
        """The next integers."""
        return layout.unpack(self.take(layout.size).tobytes())

    def values(self, count: int, dtype: Any) -> Array:
        """The next ``count`` elements, copied: they need not lie aligned in the section."""
        return self.take(count * np.dtype(dtype).itemsize).copy().view(dtype)

    def rest(self) -> Bytes:
        """All that is left, without a copy."""
        return self.take(len(self._left))

    def end(self) -> None:
        """Nothing may follow."""
        if len(self._left):
            raise CodecError(f"{len(self._left)} bytes follow the section's end")
