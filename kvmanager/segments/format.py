"""The bytes of a stored segment: a header, a table of sections, and a section per layer, each coded by itself.

::

    offset  bytes  part
         0    256  header (`kvmanager.segments.header`), which holds the checksum of the table
       256    24n  table, an entry per layer: length of its section (8 bytes), xxh3_128 over it (16)
                   zeros up to a multiple of 64
         …         the layers' sections, one after the other without gaps

A raw section is a layer's KV as it was computed, ``[k|v, token, kv_head, head_dim]``, contiguous: so the sections of a
raw segment are ``[layer, k|v, token, kv_head, head_dim]``. That is the form in memory and in the CPU tier; in Redis a
section may be coded (the header says how), which concerns nobody here.

A reader says what it expects and gets the bytes or a `SegmentMismatch`: wrong KV is never served. The checksums make a
chain, header → table → section, that covers every byte, so any flipped bit is a mismatch, and one layer can be verified
and read by itself (`open_layers`). Pure functions without copies of the sections: any thread, one writer per buffer.
"""

import struct
from collections.abc import Sequence

from kvmanager.segments.header import (
    CHECKSUM_BYTES,
    FORMAT_VERSION,
    LOSSY_CODECS,
    PROFILE_BYTES,
    RAW,
    Buffer,
    SegmentHeader,
    bytes_of,
    checksum,
    read_header,
    stated_body_bytes,
    stated_table_digest,
)
from kvmanager.segments.keys import EXACT
from kvmanager.segments.mismatch import MismatchReason, SegmentMismatch
from kvmanager.segments.sizes import (
    ENTRY_BYTES,
    HEADER_BYTES,
    SLACK_BYTES,
    Shape,
    body_offset,
    payload_bytes,
    sealed_bytes,
    table_bytes,
)

__all__ = [
    "CHECKSUM_BYTES",
    "EXACT",
    "FORMAT_VERSION",
    "HEADER_BYTES",
    "LOSSY_CODECS",
    "PROFILE_BYTES",
    "RAW",
    "SLACK_BYTES",
    "Buffer",
    "MismatchReason",
    "SegmentHeader",
    "SegmentLayers",
    "SegmentMismatch",
    "SegmentSealer",
    "Shape",
    "body_offset",
    "open_layers",
    "open_segment",
    "payload_bytes",
    "read_header",
    "read_layers",
    "seal",
    "sealed_bytes",
    "stated_body_bytes",
    "table_bytes",
    "verify",
]

_ENTRY = struct.Struct("<Q16s")
assert _ENTRY.size == ENTRY_BYTES


class SegmentSealer:
    """Seals a segment layer by layer, as the sections are written: each is checksummed while it is in the cache.

    ``buffer`` is writable, contiguous and exactly ``header.sealed_bytes`` long, else ValueError. A section must not
    change after its `add`; without `finish` the buffer is no segment.
    """

    def __init__(self, buffer: bytearray | memoryview, header: SegmentHeader) -> None:
        self._view = memoryview(buffer).cast("B")
        self._header = header
        self._layers = 0
        self._end = body_offset(header.shape[0])
        if len(self._view) != header.sealed_bytes:
            raise ValueError(f"buffer has {len(self._view)} bytes, header and body need {header.sealed_bytes}")
        self._view[HEADER_BYTES : self._end] = bytes(self._end - HEADER_BYTES)

    def add(self, nbytes: int | None = None) -> bytes:
        """Note that the next layer's section, of ``nbytes``, is written; None: a raw one. Raises ValueError.

        Returns its checksum.
        """
        layers = self._header.shape[0]
        length = payload_bytes(self._header.shape, self._header.dtype) // layers if nbytes is None else nbytes
        if self._layers == layers or not 0 <= length <= len(self._view) - self._end:
            raise ValueError(f"a section of {length} bytes does not fit the header, after {self._layers} of {layers}")
        digest = checksum(self._view[self._end : self._end + length])
        _ENTRY.pack_into(self._view, HEADER_BYTES + self._layers * ENTRY_BYTES, length, digest)
        self._layers += 1
        self._end += length
        return digest

    def finish(self) -> None:
        """Write the header. Raises ValueError when the sections are not those that it states."""
        layers = self._header.shape[0]
        if self._layers != layers or self._end != len(self._view):
            raise ValueError(f"{self._layers} sections end at {self._end}, {layers} shall end at {len(self._view)}")
        self._header.pack_into(self._view, checksum(self._view[HEADER_BYTES : body_offset(layers)]))


def seal(buffer: bytearray | memoryview, header: SegmentHeader, section_bytes: Sequence[int] | None = None) -> None:
    """Write header and table in front of the sections that ``buffer`` already holds, all checksums included.

    ``section_bytes``: the length of each layer's section; None: they are raw. ``buffer`` is writable, contiguous, and
    exactly ``header.sealed_bytes`` long, else ValueError. The sections must not change afterwards.
    """
    sealer = SegmentSealer(buffer, header)
    for layer in range(header.shape[0]):
        sealer.add(None if section_bytes is None else section_bytes[layer])
    sealer.finish()


class SegmentLayers:
    """The layers of a segment whose header and table are verified; each layer is when it is asked for."""

    __slots__ = ("_entries", "_view", "header")

    def __init__(self, view: memoryview, header: SegmentHeader) -> None:
        """Raises SegmentMismatch when length or table of ``view`` are not those of its verified header."""
        self.header = header
        self._view = view
        self._entries = _read_table(view, header)

    def __len__(self) -> int:
        return len(self._entries)

    def layer(self, index: int) -> memoryview:
        """Return a view of a layer's section (bytes, no copy). Raises SegmentMismatch when it is damaged."""
        start, length, digest = self._entries[index]
        section = self._view[start : start + length]
        if checksum(section) != digest:
            raise SegmentMismatch(MismatchReason.CHECKSUM)
        return section

    def checksum(self, index: int) -> bytes:
        """Return the checksum that a layer's section shall have."""
        return self._entries[index][2]

    def verify(self) -> None:
        """Verify all layers; each byte is read once. Raises SegmentMismatch."""
        for index in range(len(self)):
            self.layer(index)


def read_layers(buffer: Buffer, *, key: bytes, fingerprint: bytes) -> SegmentLayers:
    """Verify header and table of a whole segment, whatever its shape and codec; the layers are not verified yet.

    Raises SegmentMismatch, and nothing else, whatever the bytes are.
    """
    header = read_header(buffer)
    if header.key != key:
        raise SegmentMismatch(MismatchReason.KEY)
    if header.fingerprint != fingerprint:
        raise SegmentMismatch(MismatchReason.FINGERPRINT)
    return SegmentLayers(bytes_of(buffer), header)


def verify(buffer: Buffer, *, key: bytes, fingerprint: bytes) -> SegmentHeader:
    """Verify everything about a whole segment but shape and codec, which its header says; return the header.

    Raises SegmentMismatch, and nothing else, whatever the bytes are.
    """
    layers = read_layers(buffer, key=key, fingerprint=fingerprint)
    layers.verify()
    return layers.header


def open_layers(buffer: Buffer, *, key: bytes, fingerprint: bytes, shape: Shape, dtype: str) -> SegmentLayers:
    """Verify every field, the length and the table of a raw segment; its layers are verified one by one by the caller.

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
        (header.codec == RAW, MismatchReason.CODEC),
    )
    for matches, reason in checks:
        if not matches:
            raise SegmentMismatch(reason)
    return SegmentLayers(bytes_of(buffer), header)


def open_segment(buffer: Buffer, *, key: bytes, fingerprint: bytes, shape: Shape, dtype: str) -> memoryview:
    """Verify a raw segment as `open_layers` and all its layers; return a view of them all (bytes, no copy).

    Raises as `open_layers`.
    """
    open_layers(buffer, key=key, fingerprint=fingerprint, shape=shape, dtype=dtype).verify()
    return bytes_of(buffer)[body_offset(shape[0]) :]


def _read_table(view: memoryview, header: SegmentHeader) -> list[tuple[int, int, bytes]]:
    """Verify length and table; return start, length and checksum of each section. What is allocated is bounded by
    ``view``."""
    if len(view) < header.sealed_bytes:
        raise SegmentMismatch(MismatchReason.TRUNCATED)
    if len(view) > header.sealed_bytes:
        raise SegmentMismatch(MismatchReason.LENGTH)
    layers = header.shape[0]
    start = body_offset(layers)
    if checksum(view[HEADER_BYTES:start]) != stated_table_digest(view):
        raise SegmentMismatch(MismatchReason.CHECKSUM)
    raw_bytes = payload_bytes(header.shape, header.dtype) // layers
    entries = []
    for length, digest in _ENTRY.iter_unpack(view[HEADER_BYTES : HEADER_BYTES + layers * ENTRY_BYTES]):
        if length > len(view) - start or (header.codec == RAW and length != raw_bytes):
            raise SegmentMismatch(MismatchReason.LENGTH)
        entries.append((start, length, digest))
        start += length
    if start != len(view):
        raise SegmentMismatch(MismatchReason.LENGTH)
    return entries
