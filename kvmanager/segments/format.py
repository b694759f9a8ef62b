"""The bytes of a stored segment: a head, a table, and a section per layer, each coded by itself.

::

    part
    head      header and block hashes (`kvmanager.segments.head`), which hold the checksum of the table
    table     of a raw segment, per layer: xxh3_128 over the keys of every m blocks, then over their values (16 each)
              of a coded one, per layer: length of its section (8), xxh3_128 over it (16)
              zeros up to a multiple of 64
    sections  of the layers, one after the other without gaps

A raw section is a layer's KV as it was computed, ``[k|v, token, kv_head, head_dim]``, contiguous: so the sections of a
raw segment are ``[layer, k|v, token, kv_head, head_dim]``. Of latents a section is ``[1, token, 1, width]``, and its
part of the table has one half. That is the form in memory and in the CPU tier; in Redis a
section may be coded (the header says how), which this module leaves to the codecs. A segment that is not dense
(`SegmentHeader.is_dense`) is coded too, but no layer of it can be decoded to a raw one.

A reader says what it expects and gets the bytes or a `SegmentMismatch`: wrong KV is never served. The checksums make a
chain, header → table → section, that covers every byte, so any flipped bit is a mismatch. One layer can be verified and
read by itself (`open_layers`), and of a raw one some blocks: using a segment's first blocks reads no more than
those that share a checksum with them. m is 1 unless blocks are small (`kvmanager.segments.sizes.CHECKED_BYTES`).
Pure functions without copies of the sections: any thread, one writer per buffer.
"""

import struct
from collections.abc import Sequence
from functools import lru_cache

from kvmanager.segments.head import (
    FORMAT_VERSION,
    Buffer,
    bytes_of,
    checksum,
    read_header,
    stated_body_bytes,
    stated_head_bytes,
    stated_table_digest,
    write_header,
)
from kvmanager.segments.header import LOSSY_CODECS, PROFILE_BYTES, RAW, SegmentHeader
from kvmanager.segments.keys import EXACT
from kvmanager.segments.mismatch import MismatchReason, SegmentMismatch
from kvmanager.segments.sizes import (
    CHECKSUM_BYTES,
    ENTRY_BYTES,
    HEADER_BYTES,
    SLACK_BYTES,
    Shape,
    blocks_per_checksum,
    body_offset,
    coded_body_offset,
    head_bytes,
    payload_bytes,
    sealed_bytes,
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
    "coded_body_offset",
    "head_bytes",
    "open_layers",
    "open_segment",
    "payload_bytes",
    "read_header",
    "read_layers",
    "seal",
    "sealed_bytes",
    "stated_body_bytes",
    "stated_head_bytes",
    "verify",
]

_ENTRY = struct.Struct("<Q16s")
assert _ENTRY.size == ENTRY_BYTES


class LayerChecksums:
    """Which bytes of a raw layer's section each of its checksums is over: first those of the keys, then the values'.

    Latents are one half.
    """

    __slots__ = ("_blocks", "_bounds", "_halves", "_num_blocks", "section_bytes", "table_bytes")

    def __init__(self, shape: Shape, dtype: str, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._blocks = blocks_per_checksum(shape, dtype, num_blocks)
        self.section_bytes = payload_bytes(shape, dtype) // shape[0]
        self._halves = shape[1]
        half = self.section_bytes // self._halves
        step = self._blocks * (half // num_blocks)
        starts = range(0, half, step)
        self._bounds = [
            (base + at, base + min(at + step, half)) for base in range(0, self.section_bytes, half) for at in starts
        ]
        self.table_bytes = CHECKSUM_BYTES * len(self._bounds)

    def of(self, section: memoryview) -> bytes:
        """Return the checksums of a section as it is."""
        return b"".join([checksum(section[start:end]) for start, end in self._bounds])

    def matches(self, section: memoryview, stated: bytes, first: int, end: int) -> bool:
        """Return whether blocks ``[first, end)`` of a section, and those that share a checksum with one, are right."""
        if (first, end) == (0, self._num_blocks):
            return self.of(section) == stated
        units = range(first // self._blocks, -(-end // self._blocks)) if first < end else range(0)
        of_half = len(self._bounds) // self._halves
        for number in (half * of_half + unit for half in range(self._halves) for unit in units):
            start, stop = self._bounds[number]
            at = CHECKSUM_BYTES * number
            if checksum(section[start:stop]) != stated[at : at + CHECKSUM_BYTES]:
                return False
        return True


_layer_checksums = lru_cache(maxsize=256)(LayerChecksums)  # a model's segments differ in their number of blocks only


class SegmentSealer:
    """Seals a segment layer by layer, as the sections are written: each is checksummed while it is in the cache.

    ``buffer`` is writable, contiguous and exactly ``header.sealed_bytes`` long, else ValueError. A section must not
    change after its `add`; without `finish` the buffer is no segment.
    """

    def __init__(self, buffer: bytearray | memoryview, header: SegmentHeader) -> None:
        self._view = memoryview(buffer).cast("B")
        self._header = header
        self._checksums = _layer_checksums(header.shape, header.dtype, header.num_blocks)
        self._layers = 0
        self._table = header.head_bytes
        self._end = header.body_offset
        if len(self._view) != header.sealed_bytes:
            raise ValueError(f"buffer has {len(self._view)} bytes, head and body need {header.sealed_bytes}")
        self._view[self._table : self._end] = bytes(self._end - self._table)

    def add(self, nbytes: int | None = None) -> bytes:
        """Note that the next layer's section, of ``nbytes``, is written; None: a raw one. Raises ValueError.

        Returns its checksum: of a raw one, over those in the table.
        """
        layers = self._header.shape[0]
        raw_bytes = self._checksums.section_bytes
        length = raw_bytes if nbytes is None else nbytes
        misfits = not 0 <= length <= len(self._view) - self._end or (self._header.codec == RAW and length != raw_bytes)
        if self._layers == layers or misfits:
            raise ValueError(f"a section of {length} bytes does not fit the header, after {self._layers} of {layers}")
        section = self._view[self._end : self._end + length]
        if self._header.codec == RAW:
            digests = self._checksums.of(section)
            at = self._table + self._layers * len(digests)
            self._view[at : at + len(digests)] = digests
            digest = checksum(digests)
        else:
            digest = checksum(section)
            _ENTRY.pack_into(self._view, self._table + self._layers * ENTRY_BYTES, length, digest)
        self._layers += 1
        self._end += length
        return digest

    def finish(self) -> None:
        """Write the head. Raises ValueError when the sections are not those that it states."""
        layers = self._header.shape[0]
        if self._layers != layers or self._end != len(self._view):
            raise ValueError(f"{self._layers} sections end at {self._end}, {layers} should end at {len(self._view)}")
        table = self._view[self._table : self._header.body_offset]
        write_header(self._view, self._header, checksum(table))


def seal(buffer: bytearray | memoryview, header: SegmentHeader, section_bytes: Sequence[int] | None = None) -> None:
    """Write head and table in front of the sections that ``buffer`` already holds, all checksums included.

    ``section_bytes``: the length of each layer's section; None: they are raw. ``buffer`` is writable, contiguous, and
    exactly ``header.sealed_bytes`` long, else ValueError. The sections must not change afterwards.
    """
    sealer = SegmentSealer(buffer, header)
    for layer in range(header.shape[0]):
        sealer.add(None if section_bytes is None else section_bytes[layer])
    sealer.finish()


class SegmentLayers:
    """The layers of a segment whose head and table are verified; each layer is when it is asked for."""

    __slots__ = ("_checksums", "_entries", "_start", "_table", "_view", "header")

    def __init__(self, view: memoryview, header: SegmentHeader) -> None:
        """Raises SegmentMismatch when length or table of ``view`` are not those of its verified header."""
        self.header = header
        self._view = view
        self._start = header.body_offset
        self._table = _verified_table(view, header)
        self._checksums = _layer_checksums(header.shape, header.dtype, header.num_blocks)
        self._entries = None if header.codec == RAW else _read_entries(self._table, header, len(view))

    def __len__(self) -> int:
        return self.header.shape[0]

    def layer(self, index: int) -> memoryview:
        """Return a view of a layer's section (bytes, no copy). Raises SegmentMismatch when it is damaged."""
        if self._entries is None:
            return self.blocks(index, 0, self.header.num_blocks)
        start, length, digest = self._entries[index]
        section = self._view[start : start + length]
        if checksum(section) != digest:
            raise SegmentMismatch(MismatchReason.CHECKSUM)
        return section

    def blocks(self, index: int, first: int, end: int) -> memoryview:
        """Return a view of a raw layer's section, of which blocks ``[first, end)`` are verified.

        Others are read only where they share a checksum with these. Raises SegmentMismatch when one is damaged.
        """
        section_bytes = self._checksums.section_bytes
        start = self._start + index * section_bytes
        section = self._view[start : start + section_bytes]
        stated = bytes(self._layer_table(index))
        if not self._checksums.matches(section, stated, first, end):
            raise SegmentMismatch(MismatchReason.CHECKSUM)
        return section

    def checksum(self, index: int) -> bytes:
        """Return the checksum stated for a layer's section; see `SegmentSealer.add`."""
        return checksum(self._layer_table(index)) if self._entries is None else self._entries[index][2]

    def verify(self) -> None:
        """Verify all layers; each byte is read once. Raises SegmentMismatch."""
        for index in range(len(self)):
            self.layer(index)

    def _layer_table(self, index: int) -> memoryview:
        """The checksums of a raw layer."""
        nbytes = self._checksums.table_bytes
        return self._table[index * nbytes : (index + 1) * nbytes]


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


def open_layers(
    buffer: Buffer, *, key: bytes, fingerprint: bytes, shape: Shape, dtype: str, num_blocks: int
) -> SegmentLayers:
    """Verify every field, the length and the table of a raw segment; its layers are verified one by one by the caller.

    Raises SegmentMismatch with the first field that differs from what the caller expects; ValueError only for an
    expectation that no segment can meet.
    """
    payload_bytes(shape, dtype)
    header = read_header(buffer)
    checks = (
        (header.key == key, MismatchReason.KEY),
        (header.fingerprint == fingerprint, MismatchReason.FINGERPRINT),
        (header.shape == tuple(shape) and header.num_blocks == num_blocks, MismatchReason.SHAPE),
        (header.dtype == dtype, MismatchReason.DTYPE),
        (header.codec == RAW, MismatchReason.CODEC),
    )
    for matches, reason in checks:
        if not matches:
            raise SegmentMismatch(reason)
    return SegmentLayers(bytes_of(buffer), header)


def open_segment(
    buffer: Buffer, *, key: bytes, fingerprint: bytes, shape: Shape, dtype: str, num_blocks: int
) -> memoryview:
    """Verify a raw segment as `open_layers` and all its layers; return a view of them all (bytes, no copy).

    Raises as `open_layers`.
    """
    layers = open_layers(buffer, key=key, fingerprint=fingerprint, shape=shape, dtype=dtype, num_blocks=num_blocks)
    layers.verify()
    return bytes_of(buffer)[layers.header.body_offset :]


def _verified_table(view: memoryview, header: SegmentHeader) -> memoryview:
    """The table of a segment whose length and table are those that its header states; nothing is allocated."""
    if len(view) < header.sealed_bytes:
        raise SegmentMismatch(MismatchReason.TRUNCATED)
    if len(view) > header.sealed_bytes:
        raise SegmentMismatch(MismatchReason.LENGTH)
    table = view[header.head_bytes : header.body_offset]
    if checksum(table) != stated_table_digest(view):
        raise SegmentMismatch(MismatchReason.CHECKSUM)
    return table


def _read_entries(table: memoryview, header: SegmentHeader, end: int) -> list[tuple[int, int, bytes]]:
    """Start, length and checksum of each section of a coded segment that ends at ``end``. Raises SegmentMismatch."""
    start = header.body_offset
    entries = []
    for length, digest in _ENTRY.iter_unpack(table[: header.shape[0] * ENTRY_BYTES]):
        if length > end - start:
            raise SegmentMismatch(MismatchReason.LENGTH)
        entries.append((start, length, digest))
        start += length
    if start != end:
        raise SegmentMismatch(MismatchReason.LENGTH)
    return entries
