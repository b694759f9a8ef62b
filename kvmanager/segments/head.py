"""The head of a stored segment in bytes: a `SegmentHeader` in 256 of them, and the hashes of its blocks.

::

    offset  bytes  field (little-endian)
         0      8  magic "CROSSKV" and a zero
         8      2  format version
        10      2  dtype code
        12      2  codec code: how each layer's section is coded
        14      2  kind code (1 = request, 2 = answer, 3 = state)
        16     20  shape: layers, 2 (k, v) or 1 (latents), tokens, kv_heads, head_dim
        36      4  start block
        40      4  number of blocks, n
        44      2  level of the codec; 0 for one without levels
        46      1  fidelity code (0 = exact, 1 = tolerant)
        47      1  zero; in Redis how it is guarded (`kvmanager.segments.guard`)
        48      8  body length: everything after the head
        56     32  segment key
        88     32  key of the parent segment; zeros for none
       120     32  model fingerprint
       152      8  tenant tag (`kvmanager.segments.keys.tenant_tag`); zeros for none
       160     16  digest of the codec's profile; zeros for none
       176     16  xxh3_128 over the table (`kvmanager.segments.format`)
       192     48  zeros; in Redis what guards it
       240     16  xxh3_128 over bytes 0..239 and the hashes
       256    32n  hash of each block; the last one is the segment key

The head names the segment's place in its sequence and can be trusted by itself, so that a tier which outlives the
server is indexed again from the heads alone (`read_header`). The hashes say which prompts have a segment's first blocks
in common. What the head states of the body is bounded by its shape, so a reader that believes it allocates no more than
the segment's raw size and a little. Pure functions: any thread.
"""

import struct
from collections.abc import Mapping
from typing import TypeAlias, TypeVar

import xxhash

from kvmanager.segments.header import CODECS, NO_PARENT, NO_PROFILE, SegmentHeader
from kvmanager.segments.keys import FIDELITIES, HASH_BYTES, TENANT_BYTES
from kvmanager.segments.mismatch import MismatchReason, SegmentMismatch
from kvmanager.segments.sizes import BYTES, CHECKSUM_BYTES, HEADER_BYTES, MOST_SEGMENT_BLOCKS, head_bytes
from kvmanager.segments.spans import NodeKind

Buffer: TypeAlias = bytes | bytearray | memoryview

FORMAT_VERSION = 6

_MAGIC = b"CROSSKV\0"
_FIELDS = struct.Struct("<8sHHHH5IIIHBBQ32s32s32s8s16s16s48s")
BLOCKS_OFFSET, PROTECTION_OFFSET, KEY_OFFSET, GUARD_OFFSET, GUARD_BYTES = 40, 47, 56, 192, 48
_DTYPES = {"float16": 1, "bfloat16": 2, "float32": 3, "uint8": 4}
_KINDS = {NodeKind.REQUEST: 1, NodeKind.ANSWER: 2, NodeKind.STATE: 3}
_NO_TENANT = bytes(TENANT_BYTES)
_ZEROS = bytes(GUARD_BYTES)

_T = TypeVar("_T")


def write_header(buffer: memoryview, header: SegmentHeader, table_digest: bytes) -> None:
    """Write the head, its own checksum included, over the first ``header.head_bytes`` of a buffer."""
    buffer[HEADER_BYTES : header.head_bytes] = header.block_hashes
    _FIELDS.pack_into(
        buffer,
        0,
        _MAGIC,
        FORMAT_VERSION,
        _DTYPES[header.dtype],
        CODECS[header.codec],
        _KINDS[header.kind],
        *header.shape,
        header.start_block,
        header.num_blocks,
        header.level,
        FIDELITIES[header.fidelity],
        0,
        header.body_bytes,
        header.key,
        header.parent or NO_PARENT,
        header.fingerprint,
        bytes.fromhex(header.tenant) or _NO_TENANT,
        header.profile or NO_PROFILE,
        table_digest,
        _ZEROS,
    )
    reseal_header(buffer)


def reseal_header(buffer: bytearray | memoryview) -> None:
    """Rewrite the head's own checksum."""
    view = memoryview(buffer)
    view[_FIELDS.size : HEADER_BYTES] = _own_checksum(view)


def stated_head_bytes(buffer: Buffer) -> int:
    """Return the size of the head that a header states, unverified and bounded. Raises SegmentMismatch."""
    view = bytes_of(buffer)
    stated_format(view)
    num_blocks = _num_blocks(view)
    if not 1 <= num_blocks <= MOST_SEGMENT_BLOCKS:
        raise SegmentMismatch(MismatchReason.HEADER)
    if len(view) < head_bytes(num_blocks):
        raise SegmentMismatch(MismatchReason.TRUNCATED)
    return head_bytes(num_blocks)


def stated_body_bytes(buffer: Buffer) -> int | None:
    """Return the length that a header states, unverified, to fetch the body by; None for what is no header."""
    view = bytes_of(buffer)
    magic, version, *_, length = _FIELDS.unpack_from(view)[:16]
    return int(length) if (magic, version) == (_MAGIC, FORMAT_VERSION) else None


def stated_format(view: memoryview) -> None:
    """Raise SegmentMismatch for a header that states another format than this one."""
    magic, version = _FIELDS.unpack_from(view)[:2]
    if magic != _MAGIC:
        raise SegmentMismatch(MismatchReason.MAGIC)
    if version != FORMAT_VERSION:
        raise SegmentMismatch(MismatchReason.VERSION)


def read_header(buffer: Buffer) -> SegmentHeader:
    """Return the verified head of a segment of which ``buffer`` holds the head at least.

    Says nothing of the body. Raises SegmentMismatch, and nothing else, whatever the bytes are.
    """
    view = bytes_of(buffer)
    block_hashes = bytes(view[HEADER_BYTES : stated_head_bytes(view)])
    _, _, dtype, codec, kind, *rest = _FIELDS.unpack_from(view)
    layers, halves, tokens, heads, dim, start_block, _, level, fidelity, protection, length, *digests = rest
    key, parent, fingerprint, tag, profile, _, zeros = digests
    sound = view[_FIELDS.size : HEADER_BYTES] == _own_checksum(view) and block_hashes[-HASH_BYTES:] == key
    if not sound or protection or zeros != _ZEROS:
        raise SegmentMismatch(MismatchReason.HEADER)
    named = {
        "dtype": _named(_DTYPES, dtype, MismatchReason.DTYPE),
        "codec": _named(CODECS, codec, MismatchReason.CODEC),
        "fidelity": _named(FIDELITIES, fidelity, MismatchReason.HEADER),
    }
    found_kind = _named(_KINDS, kind, MismatchReason.KIND)
    if named["dtype"] == BYTES and tokens == 1:  # states that were stored before they had a kind of their own
        found_kind = NodeKind.STATE
    try:
        return SegmentHeader(
            **named,
            kind=found_kind,
            block_hashes=block_hashes,
            fingerprint=fingerprint,
            shape=(layers, halves, tokens, heads, dim),
            level=level,
            body_bytes=length,
            parent=None if parent == NO_PARENT else parent,
            start_block=start_block,
            tenant="" if tag == _NO_TENANT else tag.hex(),
            profile=b"" if profile == NO_PROFILE else profile,
        )
    except ValueError:
        raise SegmentMismatch(MismatchReason.HEADER) from None


def stated_table_digest(view: memoryview) -> bytes:
    """Return the checksum of the table that a header states."""
    return bytes(view[_FIELDS.size - len(_ZEROS) - CHECKSUM_BYTES : _FIELDS.size - len(_ZEROS)])


def bytes_of(buffer: Buffer) -> memoryview:
    """Return a view of at least a header's bytes. Raises SegmentMismatch for less."""
    view = memoryview(buffer)
    if view.nbytes < HEADER_BYTES:  # before the cast, which an empty array does not take
        raise SegmentMismatch(MismatchReason.TRUNCATED)
    return view.cast("B")


def checksum(view: Buffer) -> bytes:
    """Return xxh3_128: it tells damage, not intent."""
    return xxhash.xxh3_128_digest(view)


def _num_blocks(view: memoryview) -> int:
    return int.from_bytes(view[BLOCKS_OFFSET : BLOCKS_OFFSET + 4], "little")


def _own_checksum(view: memoryview) -> bytes:
    """Return the checksum that a head has to state, of as many hashes as it states and ``view`` has."""
    digest = xxhash.xxh3_128(view[: _FIELDS.size])
    digest.update(view[HEADER_BYTES : head_bytes(_num_blocks(view))])
    return digest.digest()


def _named(codes: Mapping[_T, int], code: int, otherwise: MismatchReason) -> _T:
    for name, known in codes.items():
        if known == code:
            return name
    raise SegmentMismatch(otherwise)
