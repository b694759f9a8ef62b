"""The bytes of a stored segment: a fixed header and the payload, the same in memory and on every tier.

::

    offset  bytes  field (little-endian)
         0      8  magic "CROSSKV" and a zero
         8      2  format version
        10      2  dtype code
        12      2  codec code (0 = raw)
        14      2  zero
        16     20  shape: layers, 2 (k, v), tokens, kv_heads, head_dim
        36      4  zero
        40      8  payload length
        48     32  segment key
        80     32  model fingerprint
       112     16  xxh3_128 over bytes 0..111 and the payload
       128         payload: [layer, k|v, token, kv_head, head_dim], contiguous

A reader says what it expects and gets the payload or a `SegmentMismatch`: wrong KV is never served. The checksum covers
every byte, so any flipped bit is one. Pure functions without copies of the payload: any thread, one writer per buffer.
"""

import math
import struct
from dataclasses import dataclass
from enum import StrEnum
from typing import TypeAlias

import xxhash

from kvmanager.keys import HASH_BYTES

Shape: TypeAlias = tuple[int, int, int, int, int]
"""(layers, 2, tokens, kv_heads, head_dim)"""

Buffer: TypeAlias = bytes | bytearray | memoryview

FORMAT_VERSION = 1
_MAGIC = b"CROSSKV\0"
_FIELDS = struct.Struct("<8sHHHHIIIIIIQ32s32s")
_CHECKSUM_BYTES = 16
HEADER_BYTES = _FIELDS.size + _CHECKSUM_BYTES
"""128: a multiple of 64, so that a payload in an aligned buffer is aligned too."""

_DTYPES = {"float16": (1, 2), "bfloat16": (2, 2), "float32": (3, 4)}
"""dtype -> (code, bytes per element)"""
_CODECS = {"raw": 0}


class MismatchReason(StrEnum):
    """Why a stored segment was refused; the label of the metric that counts it."""

    TRUNCATED = "truncated"
    MAGIC = "magic"
    VERSION = "version"
    KEY = "key"
    FINGERPRINT = "fingerprint"
    SHAPE = "shape"
    DTYPE = "dtype"
    CODEC = "codec"
    LENGTH = "length"
    CHECKSUM = "checksum"


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

    def __post_init__(self) -> None:
        if len(self.key) != HASH_BYTES or len(self.fingerprint) != HASH_BYTES:
            raise ValueError(f"key and fingerprint are {HASH_BYTES} bytes each")
        if self.codec not in _CODECS:
            raise ValueError(f"unknown codec {self.codec!r}; the format knows {sorted(_CODECS)}")
        expected = payload_bytes(self.shape, self.dtype)
        if self.payload_bytes != expected:
            raise ValueError(f"raw {self.dtype} of shape {self.shape} is {expected} bytes, not {self.payload_bytes}")


def payload_bytes(shape: Shape, dtype: str) -> int:
    """Return the size in bytes of a raw payload. Raises ValueError for a dtype or shape that cannot be stored."""
    if dtype not in _DTYPES:
        raise ValueError(f"cannot store KV of dtype {dtype!r}; the format knows {sorted(_DTYPES)}")
    if len(shape) != 5 or shape[1] != 2 or min(shape) < 1:
        raise ValueError(f"a segment has shape (layers, 2, tokens, kv_heads, head_dim), got {shape}")
    return math.prod(shape) * _DTYPES[dtype][1]


def seal(buffer: bytearray | memoryview, header: SegmentHeader) -> None:
    """Write the header, checksum included, in front of the payload that ``buffer`` already holds.

    ``buffer`` is writable, contiguous, and exactly ``HEADER_BYTES + header.payload_bytes`` long, else ValueError.
    The payload must not change afterwards.
    """
    view = memoryview(buffer).cast("B")
    if len(view) != HEADER_BYTES + header.payload_bytes:
        raise ValueError(f"buffer has {len(view)} bytes, header and payload need {HEADER_BYTES + header.payload_bytes}")
    _FIELDS.pack_into(
        view,
        0,
        _MAGIC,
        FORMAT_VERSION,
        _DTYPES[header.dtype][0],
        _CODECS[header.codec],
        0,
        *header.shape,
        0,
        header.payload_bytes,
        header.key,
        header.fingerprint,
    )
    view[_FIELDS.size : HEADER_BYTES] = _checksum(view)


def open_segment(buffer: Buffer, *, key: bytes, fingerprint: bytes, shape: Shape, dtype: str) -> memoryview:
    """Verify every field and the checksum, and return a view of the payload (bytes, no copy).

    Raises SegmentMismatch with the first field that differs from what the caller expects; ValueError only for an
    expectation that no segment can meet.
    """
    expected_payload = payload_bytes(shape, dtype)
    view = memoryview(buffer).cast("B")
    if len(view) < HEADER_BYTES:
        raise SegmentMismatch(MismatchReason.TRUNCATED)
    magic, version, dtype_code, codec, _, *stored_shape, _, length, stored_key, stored_print = _FIELDS.unpack_from(view)
    checks = (
        (magic == _MAGIC, MismatchReason.MAGIC),
        (version == FORMAT_VERSION, MismatchReason.VERSION),
        (stored_key == key, MismatchReason.KEY),
        (stored_print == fingerprint, MismatchReason.FINGERPRINT),
        (tuple(stored_shape) == tuple(shape), MismatchReason.SHAPE),
        (dtype_code == _DTYPES[dtype][0], MismatchReason.DTYPE),
        (codec == _CODECS["raw"], MismatchReason.CODEC),
        (length == expected_payload, MismatchReason.LENGTH),
        (len(view) >= HEADER_BYTES + expected_payload, MismatchReason.TRUNCATED),
        (len(view) == HEADER_BYTES + expected_payload, MismatchReason.LENGTH),
    )
    for matches, reason in checks:
        if not matches:
            raise SegmentMismatch(reason)
    if view[_FIELDS.size : HEADER_BYTES] != _checksum(view):
        raise SegmentMismatch(MismatchReason.CHECKSUM)
    return view[HEADER_BYTES:]


def _checksum(view: memoryview) -> bytes:
    digest = xxhash.xxh3_128(view[: _FIELDS.size])
    digest.update(view[HEADER_BYTES:])
    return digest.digest()
