"""The bytes of a stored segment: a fixed header and the payload, the same in memory and on every tier.

::

    offset  bytes  field (little-endian)
         0      8  magic "CROSSKV" and a zero
         8      2  format version
        10      2  dtype code
        12      2  codec code (0 = raw)
        14      2  kind code (1 = request, 2 = answer)
        16     20  shape: layers, 2 (k, v), tokens, kv_heads, head_dim
        36      4  start block
        40      4  number of blocks
        44      4  zero
        48      8  payload length
        56     32  segment key
        88     32  key of the parent segment; zeros for none
       120     32  model fingerprint
       152      8  zero
       160     16  xxh3_128 over the payload
       176     16  xxh3_128 over bytes 0..175
       192         payload: [layer, k|v, token, kv_head, head_dim], contiguous

A reader says what it expects and gets the payload or a `SegmentMismatch`: wrong KV is never served. The two checksums
cover every byte, so any flipped bit is one. The header names the segment's place in its sequence and can be trusted by
itself, so that a tier which outlives the server is indexed again from the headers alone (`read_header`).
Pure functions without copies of the payload: any thread, one writer per buffer.
"""

import math
import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import xxhash

from kvmanager.keys import HASH_BYTES, SegmentKey
from kvmanager.segments import NodeKind, SegmentSpan

Shape: TypeAlias = tuple[int, int, int, int, int]
"""(layers, 2, tokens, kv_heads, head_dim)"""

Buffer: TypeAlias = bytes | bytearray | memoryview

FORMAT_VERSION = 2
_MAGIC = b"CROSSKV\0"
_FIELDS = struct.Struct("<8sHHHH5IIIIQ32s32s32sQ16s")
_CHECKSUM_BYTES = 16
HEADER_BYTES = _FIELDS.size + _CHECKSUM_BYTES
"""192: a multiple of 64, so that a payload in an aligned buffer is aligned too."""

_DTYPES = {"float16": (1, 2), "bfloat16": (2, 2), "float32": (3, 4)}
"""dtype -> (code, bytes per element)"""
_DTYPE_OF = {code: dtype for dtype, (code, _) in _DTYPES.items()}
_CODECS = {"raw": 0}
_CODEC_OF = {code: codec for codec, code in _CODECS.items()}
_KINDS = {NodeKind.REQUEST: 1, NodeKind.ANSWER: 2}
_KIND_OF = {code: kind for kind, code in _KINDS.items()}
_NO_PARENT = bytes(HASH_BYTES)
_LARGEST = 2**32 - 1


class MismatchReason(StrEnum):
    """Why a stored segment was refused; the label of the metric that counts it."""

    TRUNCATED = "truncated"
    MAGIC = "magic"
    VERSION = "version"
    HEADER = "header"
    """The header's checksum differs, or its fields contradict each other."""
    KEY = "key"
    FINGERPRINT = "fingerprint"
    SHAPE = "shape"
    DTYPE = "dtype"
    CODEC = "codec"
    KIND = "kind"
    LENGTH = "length"
    CHECKSUM = "checksum"
    """The payload's."""


class SegmentMismatch(Exception):  # noqa: N818 - an outcome that callers expect, like StopIteration
    """The bytes are not the segment asked for. The caller counts a miss and recomputes the tokens."""

    def __init__(self, reason: MismatchReason) -> None:
        super().__init__(f"stored segment refused: {reason.value} does not match; its tokens must be recomputed")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """What a stored segment says of itself. Raises ValueError for what the format cannot express."""

    key: bytes
    fingerprint: bytes
    shape: Shape
    dtype: str
    codec: str
    payload_bytes: int
    parent: bytes | None
    """Key of the segment that ends where this one starts; None exactly for block 0."""
    start_block: int
    num_blocks: int
    """``shape`` has a whole number of tokens per block."""
    kind: NodeKind

    def __post_init__(self) -> None:
        if any(len(digest) != HASH_BYTES for digest in (self.key, self.fingerprint, self.parent or _NO_PARENT)):
            raise ValueError(f"key, parent and fingerprint are {HASH_BYTES} bytes each")
        if self.parent in (self.key, _NO_PARENT, b""):
            raise ValueError("a parent is another segment, and its key is not zero")
        if self.codec not in _CODECS:
            raise ValueError(f"unknown codec {self.codec!r}; the format knows {sorted(_CODECS)}")
        expected = payload_bytes(self.shape, self.dtype)
        if self.payload_bytes != expected:
            raise ValueError(f"raw {self.dtype} of shape {self.shape} is {expected} bytes, not {self.payload_bytes}")
        span = self.span  # raises for a place that contradicts itself
        if self.shape[2] % self.num_blocks:
            raise ValueError(f"{self.shape[2]} tokens are not {self.num_blocks} blocks of one size")
        if max(*self.shape, span.end_block) > _LARGEST or self.payload_bytes >= 2**63:
            raise ValueError(f"numbers up to {_LARGEST} can be stored, got shape {self.shape} and {span}")

    @property
    def span(self) -> SegmentSpan:
        """The segment's name and place, as the index knows it."""
        parent = None if self.parent is None else SegmentKey(self.parent)
        return SegmentSpan(SegmentKey(self.key), parent, self.start_block, self.num_blocks, self.kind)

    @property
    def sealed_bytes(self) -> int:
        """Size of the stored segment, header included."""
        return HEADER_BYTES + self.payload_bytes


def payload_bytes(shape: Shape, dtype: str) -> int:
    """Return the size in bytes of a raw payload. Raises ValueError for a dtype or shape that cannot be stored."""
    if dtype not in _DTYPES:
        raise ValueError(f"cannot store KV of dtype {dtype!r}; the format knows {sorted(_DTYPES)}")
    if len(shape) != 5 or shape[1] != 2 or min(shape) < 1:
        raise ValueError(f"a segment has shape (layers, 2, tokens, kv_heads, head_dim), got {shape}")
    return math.prod(shape) * _DTYPES[dtype][1]


def seal(buffer: bytearray | memoryview, header: SegmentHeader) -> None:
    """Write the header, both checksums included, in front of the payload that ``buffer`` already holds.

    ``buffer`` is writable, contiguous, and exactly ``header.sealed_bytes`` long, else ValueError.
    The payload must not change afterwards.
    """
    view = memoryview(buffer).cast("B")
    if len(view) != header.sealed_bytes:
        raise ValueError(f"buffer has {len(view)} bytes, header and payload need {header.sealed_bytes}")
    _FIELDS.pack_into(
        view,
        0,
        _MAGIC,
        FORMAT_VERSION,
        _DTYPES[header.dtype][0],
        _CODECS[header.codec],
        _KINDS[header.kind],
        *header.shape,
        header.start_block,
        header.num_blocks,
        0,
        header.payload_bytes,
        header.key,
        header.parent or _NO_PARENT,
        header.fingerprint,
        0,
        _digest(view[HEADER_BYTES:]),
    )
    view[_FIELDS.size : HEADER_BYTES] = _digest(view[: _FIELDS.size])


def read_header(buffer: Buffer) -> SegmentHeader:
    """Return the verified header of a segment of which ``buffer`` holds the first `HEADER_BYTES` at least.

    Says nothing of the payload. Raises SegmentMismatch, and nothing else, whatever the bytes are.
    """
    view = _bytes_of(buffer)
    magic, version, dtype, codec, kind, *numbers, length, key, parent, fingerprint, zero, _ = _FIELDS.unpack_from(view)
    layers, halves, tokens, heads, dim, start_block, num_blocks, padding = numbers
    checks = (
        (magic == _MAGIC, MismatchReason.MAGIC),
        (version == FORMAT_VERSION, MismatchReason.VERSION),
        (view[_FIELDS.size : HEADER_BYTES] == _digest(view[: _FIELDS.size]), MismatchReason.HEADER),
        (dtype in _DTYPE_OF, MismatchReason.DTYPE),
        (codec in _CODEC_OF, MismatchReason.CODEC),
        (kind in _KIND_OF, MismatchReason.KIND),
        (padding == zero == 0, MismatchReason.HEADER),
    )
    for matches, reason in checks:
        if not matches:
            raise SegmentMismatch(reason)
    try:
        return SegmentHeader(
            key=key,
            fingerprint=fingerprint,
            shape=(layers, halves, tokens, heads, dim),
            dtype=_DTYPE_OF[dtype],
            codec=_CODEC_OF[codec],
            payload_bytes=length,
            parent=None if parent == _NO_PARENT else parent,
            start_block=start_block,
            num_blocks=num_blocks,
            kind=_KIND_OF[kind],
        )
    except ValueError:
        raise SegmentMismatch(MismatchReason.HEADER) from None


def verify(buffer: Buffer, *, key: bytes, fingerprint: bytes) -> SegmentHeader:
    """Verify everything about a whole segment but the shape, which its header says; return the header.

    Raises SegmentMismatch, and nothing else, whatever the bytes are.
    """
    header = read_header(buffer)
    if header.key != key:
        raise SegmentMismatch(MismatchReason.KEY)
    if header.fingerprint != fingerprint:
        raise SegmentMismatch(MismatchReason.FINGERPRINT)
    _verify_payload(_bytes_of(buffer), header.payload_bytes)
    return header


def open_segment(buffer: Buffer, *, key: bytes, fingerprint: bytes, shape: Shape, dtype: str) -> memoryview:
    """Verify every field and the checksums, and return a view of the payload (bytes, no copy).

    Raises SegmentMismatch with the first field that differs from what the caller expects; ValueError only for an
    expectation that no segment can meet.
    """
    payload_bytes(shape, dtype)
    header = read_header(buffer)
    checks = (
        (header.key == key, MismatchReason.KEY),
        (header.fingerprint == fingerprint, MismatchReason.FINGERPRINT),
        (header.shape == tuple(shape), MismatchReason.SHAPE),
        (header.dtype == dtype, MismatchReason.DTYPE),
    )
    for matches, reason in checks:
        if not matches:
            raise SegmentMismatch(reason)
    view = _bytes_of(buffer)
    _verify_payload(view, header.payload_bytes)
    return view[HEADER_BYTES:]


def _bytes_of(buffer: Buffer) -> memoryview:
    view = memoryview(buffer)
    if view.nbytes < HEADER_BYTES:  # before the cast, which an empty array does not take
        raise SegmentMismatch(MismatchReason.TRUNCATED)
    return view.cast("B")


def _verify_payload(view: memoryview, nbytes: int) -> None:
    """Compare length and checksum of the payload with what the verified header of ``view`` says."""
    if len(view) < HEADER_BYTES + nbytes:
        raise SegmentMismatch(MismatchReason.TRUNCATED)
    if len(view) > HEADER_BYTES + nbytes:
        raise SegmentMismatch(MismatchReason.LENGTH)
    if view[_FIELDS.size - _CHECKSUM_BYTES : _FIELDS.size] != _digest(view[HEADER_BYTES:]):
        raise SegmentMismatch(MismatchReason.CHECKSUM)


def _digest(view: memoryview) -> bytes:
    return xxhash.xxh3_128_digest(view)
