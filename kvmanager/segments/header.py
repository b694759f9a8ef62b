"""The header of a stored segment: what it says of itself, in 256 bytes.

::

    offset  bytes  field (little-endian)
         0      8  magic "CROSSKV" and a zero
         8      2  format version
        10      2  dtype code
        12      2  codec code: how each layer's section is coded
        14      2  kind code (1 = request, 2 = answer)
        16     20  shape: layers, 2 (k, v), tokens, kv_heads, head_dim
        36      4  start block
        40      4  number of blocks
        44      2  level of the codec; 0 for one without levels
        46      1  fidelity code (0 = exact, 1 = tolerant)
        47      1  zero; in Redis how it is guarded (`kvmanager.segments.guard`)
        48      8  body length: everything after the header
        56     32  segment key
        88     32  key of the parent segment; zeros for none
       120     32  model fingerprint
       152      8  tenant tag (`kvmanager.segments.keys.tenant_tag`); zeros for none
       160     16  digest of the codec's profile; zeros for none
       176     16  xxh3_128 over the table of sections (`kvmanager.segments.format`)
       192     48  zeros; in Redis what guards it
       240     16  xxh3_128 over bytes 0..239

The header names the segment's place in its sequence and can be trusted by itself, so that a tier which outlives the
server is indexed again from the headers alone (`read_header`). What it states of the body is bounded by its shape, so
nobody who believes it allocates more than the segment's raw size and a little. Pure functions: any thread.
"""

import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Final, TypeAlias, TypeVar

import xxhash

from kvmanager.segments.keys import EXACT, HASH_BYTES, TENANT_BYTES, TOLERANT, SegmentKey
from kvmanager.segments.mismatch import MismatchReason, SegmentMismatch
from kvmanager.segments.sizes import HEADER_BYTES, SLACK_BYTES, Shape, payload_bytes, sealed_bytes, table_bytes
from kvmanager.segments.spans import MARK_BYTES, NodeKind, SegmentSpan

Buffer: TypeAlias = bytes | bytearray | memoryview

FORMAT_VERSION = 5
RAW: Final = "raw"
CHECKSUM_BYTES = 16
PROFILE_BYTES = 16

_MAGIC = b"CROSSKV\0"
_FIELDS = struct.Struct("<8sHHHH5IIIHBBQ32s32s32s8s16s16s48s")
PROTECTION_OFFSET, KEY_OFFSET, GUARD_OFFSET, GUARD_BYTES = 47, 56, 192, 48
_DTYPES = {"float16": 1, "bfloat16": 2, "float32": 3}
_CODECS = {RAW: 0, "lossless": 1, "int8": 2, "cachegen": 4}
LOSSY_CODECS = frozenset({"int8", "cachegen"})
_FIDELITIES = {EXACT: 0, TOLERANT: 1}
_KINDS = {NodeKind.REQUEST: 1, NodeKind.ANSWER: 2}
_NO_PARENT = bytes(HASH_BYTES)
_NO_TENANT = bytes(TENANT_BYTES)
_NO_PROFILE = bytes(PROFILE_BYTES)
_ZEROS = bytes(GUARD_BYTES)
_LARGEST = 2**32 - 1
_LARGEST_LEVEL = 2**16 - 1

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """What a stored segment says of itself. Raises ValueError for what the format cannot express."""

    key: bytes
    fingerprint: bytes
    shape: Shape
    dtype: str
    body_bytes: int
    """Everything after the header: the table and the layers' sections, as they are coded."""
    parent: bytes | None
    """Key of the segment that ends where this one starts; None exactly for block 0."""
    start_block: int
    num_blocks: int
    """``shape`` has a whole number of tokens per block."""
    kind: NodeKind
    tenant: str = ""
    """Tag of the tenant in lower-case hexadecimal, empty for none."""
    codec: str = RAW
    level: int = 0
    fidelity: str = EXACT
    """"exact" or "tolerant": the namespace that the segment belongs to. An exact one has no lossy form."""
    profile: bytes = b""
    """Digest of the codec's profile, empty for a codec without one."""

    def __post_init__(self) -> None:
        if any(len(digest) != HASH_BYTES for digest in (self.key, self.fingerprint, self.parent or _NO_PARENT)):
            raise ValueError(f"key, parent and fingerprint are {HASH_BYTES} bytes each")
        if self.parent in (self.key, _NO_PARENT, b""):
            raise ValueError("a parent is another segment, and its key is not zero")
        if self.tenant and not _is_tag(self.tenant):
            raise ValueError(
                f"a tenant tag is {2 * TENANT_BYTES} lower-case hex digits other than 0s, got {self.tenant!r}"
            )
        self._check_coding()
        least = table_bytes(self.shape[0])
        raw = payload_bytes(self.shape, self.dtype)
        most = least + raw + (SLACK_BYTES * self.shape[0] if self.codec != RAW else 0)
        if not (least <= self.body_bytes <= most) or (self.codec == RAW and self.body_bytes != most):
            raise ValueError(
                f"{self.codec} {self.dtype} of shape {self.shape} has a body of at most {most} bytes "
                f"(raw: exactly), not {self.body_bytes}"
            )
        if self.num_blocks < 1 or self.shape[2] < 1 or self.shape[2] % self.num_blocks:
            raise ValueError(f"{self.shape[2]} tokens are not at least one block, {self.num_blocks} of one size")
        span = self.span  # raises for a place that contradicts itself
        if max(*self.shape, span.end_block) > _LARGEST or self.body_bytes >= 2**63:
            raise ValueError(f"numbers up to {_LARGEST} can be stored, got shape {self.shape} and {span}")

    def _check_coding(self) -> None:
        if self.codec not in _CODECS:
            raise ValueError(f"unknown codec {self.codec!r}; the format knows {sorted(_CODECS)}")
        if self.fidelity not in _FIDELITIES:
            raise ValueError(f"unknown fidelity {self.fidelity!r}; the format knows {sorted(_FIDELITIES)}")
        lossy = self.codec in LOSSY_CODECS
        if lossy and self.fidelity == EXACT:
            raise ValueError(f"an exact segment has no lossy form such as {self.codec}")
        if not 0 <= self.level <= (_LARGEST_LEVEL if lossy else 0):
            raise ValueError(f"{self.codec} has no level {self.level}")
        if self.profile and (not lossy or len(self.profile) != PROFILE_BYTES or self.profile == _NO_PROFILE):
            raise ValueError(f"a profile is that of a lossy codec, named by {PROFILE_BYTES} bytes other than zeros")

    @classmethod
    def raw(
        cls, span: SegmentSpan, fingerprint: bytes, shape: Shape, dtype: str, fidelity: str = EXACT
    ) -> "SegmentHeader":
        """The header of a segment that is stored as it was computed. Raises ValueError as the class does."""
        return cls(
            key=span.key,
            fingerprint=fingerprint,
            shape=shape,
            dtype=dtype,
            body_bytes=sealed_bytes(shape, dtype) - HEADER_BYTES,
            parent=span.parent,
            start_block=span.start_block,
            num_blocks=span.num_blocks,
            kind=span.kind,
            tenant=span.tenant,
            fidelity=fidelity,
        )

    @property
    def decoded(self) -> "SegmentHeader":
        """The header of the same segment, raw again."""
        nbytes = self.raw_sealed_bytes - HEADER_BYTES
        return replace(self, codec=RAW, level=0, profile=b"", body_bytes=nbytes)

    @property
    def span(self) -> SegmentSpan:
        """The segment's name and place, as the index knows it."""
        parent = None if self.parent is None else SegmentKey(self.parent)
        marks = bytes(MARK_BYTES * (self.num_blocks - 1)) + self.key[:MARK_BYTES]
        return SegmentSpan(
            SegmentKey(self.key), parent, self.start_block, self.num_blocks, self.kind, marks, self.tenant
        )

    @property
    def sealed_bytes(self) -> int:
        """Size of the segment as it is stored, header included."""
        return HEADER_BYTES + self.body_bytes

    @property
    def raw_sealed_bytes(self) -> int:
        """Size of the segment where it is stored raw, header included."""
        return sealed_bytes(self.shape, self.dtype)

    def pack_into(self, buffer: memoryview, table_digest: bytes) -> None:
        """Write the header, its own checksum included, over the first `HEADER_BYTES` of a buffer."""
        _FIELDS.pack_into(
            buffer,
            0,
            _MAGIC,
            FORMAT_VERSION,
            _DTYPES[self.dtype],
            _CODECS[self.codec],
            _KINDS[self.kind],
            *self.shape,
            self.start_block,
            self.num_blocks,
            self.level,
            _FIDELITIES[self.fidelity],
            0,
            self.body_bytes,
            self.key,
            self.parent or _NO_PARENT,
            self.fingerprint,
            bytes.fromhex(self.tenant) or _NO_TENANT,
            self.profile or _NO_PROFILE,
            table_digest,
            _ZEROS,
        )
        reseal_header(buffer)


def reseal_header(buffer: bytearray | memoryview) -> None:
    """Write the header's own checksum anew."""
    view = memoryview(buffer)
    view[_FIELDS.size : HEADER_BYTES] = checksum(view[: _FIELDS.size])


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
    """Return the verified header of a segment of which ``buffer`` holds the first `HEADER_BYTES` at least.

    Says nothing of the body. Raises SegmentMismatch, and nothing else, whatever the bytes are.
    """
    view = bytes_of(buffer)
    _, _, dtype, codec, kind, *rest = _FIELDS.unpack_from(view)
    layers, halves, tokens, heads, dim, start_block, num_blocks, level, fidelity, protection, length, *digests = rest
    key, parent, fingerprint, tag, profile, _, zeros = digests
    stated_format(view)
    checks = (
        (view[_FIELDS.size : HEADER_BYTES] == checksum(view[: _FIELDS.size]), MismatchReason.HEADER),
        (not protection and zeros == _ZEROS, MismatchReason.HEADER),
    )
    for matches, reason in checks:
        if not matches:
            raise SegmentMismatch(reason)
    named = {
        "dtype": _named(_DTYPES, dtype, MismatchReason.DTYPE),
        "codec": _named(_CODECS, codec, MismatchReason.CODEC),
        "fidelity": _named(_FIDELITIES, fidelity, MismatchReason.HEADER),
    }
    try:
        return SegmentHeader(
            **named,
            kind=_named(_KINDS, kind, MismatchReason.KIND),
            key=key,
            fingerprint=fingerprint,
            shape=(layers, halves, tokens, heads, dim),
            level=level,
            body_bytes=length,
            parent=None if parent == _NO_PARENT else parent,
            start_block=start_block,
            num_blocks=num_blocks,
            tenant="" if tag == _NO_TENANT else tag.hex(),
            profile=b"" if profile == _NO_PROFILE else profile,
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


def checksum(view: memoryview) -> bytes:
    """Return xxh3_128: it tells damage, not intent."""
    return xxhash.xxh3_128_digest(view)


def _named(codes: Mapping[_T, int], code: int, otherwise: MismatchReason) -> _T:
    for name, known in codes.items():
        if known == code:
            return name
    raise SegmentMismatch(otherwise)


def _is_tag(tenant: str) -> bool:
    return len(tenant) == 2 * TENANT_BYTES and set(tenant) <= set("0123456789abcdef") and set(tenant) != {"0"}
