"""What a stored segment says of itself: its place in a sequence, its blocks, whose it is, how it is coded.

`kvmanager.segments.head` says how that lies in bytes. Any thread.
"""

from dataclasses import dataclass, replace
from typing import Final

from kvmanager.segments.keys import EXACT, FIDELITIES, HASH_BYTES, TENANT_BYTES, TOLERANT, SegmentKey
from kvmanager.segments.sizes import (
    HEADER_BYTES,
    LATENT_HALVES,
    MOST_SEGMENT_BLOCKS,
    SLACK_BYTES,
    Shape,
    body_offset,
    coded_body_offset,
    head_bytes,
    payload_bytes,
    sealed_bytes,
)
from kvmanager.segments.spans import MARK_BYTES, NodeKind, SegmentSpan

RAW: Final = "raw"
PROFILE_BYTES = 16
CODECS = {RAW: 0, "lossless": 1, "cachegen": 4, "sparse": 5}
"""Their codes in a header; 2 was another codec's, and is a mismatch."""
PARTIAL_CODECS = frozenset({"sparse"})
"""They keep some tokens of each layer: a segment in such a form has no dense one, and no reader may take it for one.
Its level is the first part of its form (`kvmanager.segments.forms`)."""
LOSSY_CODECS = frozenset({"cachegen"}) | PARTIAL_CODECS
NO_PARENT = bytes(HASH_BYTES)
NO_PROFILE = bytes(PROFILE_BYTES)
_LARGEST = 2**32 - 1
_LARGEST_LEVEL = 2**16 - 1


@dataclass(frozen=True, slots=True)
class SegmentHeader:
    """What a stored segment says of itself. Raises ValueError for what the format cannot express."""

    block_hashes: bytes
    """Of each block in order, together. ``shape`` has a whole number of tokens per block."""
    fingerprint: bytes
    shape: Shape
    dtype: str
    body_bytes: int
    """Everything after the head: the table and the layers' sections, as they are coded."""
    parent: bytes | None
    """Key of the segment that holds the block before this one's first; None exactly for block 0."""
    start_block: int
    kind: NodeKind
    tenant: str = ""
    """Tag of the tenant in lower-case hexadecimal, empty for none."""
    codec: str = RAW
    level: int = 0
    fidelity: str = EXACT
    """A `kvmanager.segments.keys.Fidelity`: the namespace of the segment. Only a tolerant one has lossy forms."""
    profile: bytes = b""
    """Digest of the codec's profile, empty for a codec without one."""

    def __post_init__(self) -> None:
        if any(len(digest) != HASH_BYTES for digest in (self.fingerprint, self.parent or NO_PARENT)):
            raise ValueError(f"parent and fingerprint are {HASH_BYTES} bytes each")
        if self.parent in (self.key, NO_PARENT, b""):
            raise ValueError("a parent is another segment, and its key is not zero")
        if self.tenant and not _is_tag(self.tenant):
            raise ValueError(
                f"a tenant tag is {2 * TENANT_BYTES} lower-case hex digits other than 0s, got {self.tenant!r}"
            )
        self._check_coding()
        if len(self.block_hashes) % HASH_BYTES or not 1 <= self.num_blocks <= MOST_SEGMENT_BLOCKS:
            raise ValueError(f"a segment has 1 to {MOST_SEGMENT_BLOCKS} blocks, and a hash of {HASH_BYTES} bytes each")
        raw = payload_bytes(self.shape, self.dtype)
        if self.is_latent and self.codec in LOSSY_CODECS:
            raise ValueError(f"of latents there is no lossy form such as {self.codec}")
        least = most = self.body_offset - self.head_bytes
        most += raw + (SLACK_BYTES * self.shape[0] if self.codec != RAW else 0)
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
        if self.codec not in CODECS:
            raise ValueError(f"unknown codec {self.codec!r}; the format knows {sorted(CODECS)}")
        if self.fidelity not in FIDELITIES:
            raise ValueError(f"unknown fidelity {self.fidelity!r}; the format knows {sorted(FIDELITIES)}")
        lossy = self.codec in LOSSY_CODECS
        if lossy and self.fidelity != TOLERANT:
            raise ValueError(f"of a segment that is {self.fidelity} there is no lossy form such as {self.codec}")
        if not 0 <= self.level <= (_LARGEST_LEVEL if lossy else 0):
            raise ValueError(f"{self.codec} has no level {self.level}")
        if self.profile and (not lossy or len(self.profile) != PROFILE_BYTES or self.profile == NO_PROFILE):
            raise ValueError(f"a profile is that of a lossy codec, named by {PROFILE_BYTES} bytes other than zeros")

    @classmethod
    def raw(
        cls,
        span: SegmentSpan,
        block_hashes: bytes,
        fingerprint: bytes,
        shape: Shape,
        dtype: str,
        fidelity: str = EXACT,
    ) -> "SegmentHeader":
        """The header of a segment that is stored as it was computed, with the hashes of its blocks in order.

        Raises ValueError as the class does, and for hashes that are not the span's.
        """
        if block_hashes[-HASH_BYTES:] != span.key or len(block_hashes) != HASH_BYTES * span.num_blocks:
            raise ValueError(f"{len(block_hashes)} bytes are not the hashes of the blocks of {span}")
        return cls(
            block_hashes=block_hashes,
            fingerprint=fingerprint,
            shape=shape,
            dtype=dtype,
            body_bytes=sealed_bytes(shape, dtype, span.num_blocks) - head_bytes(span.num_blocks),
            parent=span.parent,
            start_block=span.start_block,
            kind=span.kind,
            tenant=span.tenant,
            fidelity=fidelity,
        )

    @property
    def is_latent(self) -> bool:
        """Whether it holds latents (MLA), and not keys and values."""
        return self.shape[1] == LATENT_HALVES

    @property
    def is_dense(self) -> bool:
        """Whether a raw segment can be made of it."""
        return self.codec not in PARTIAL_CODECS

    @property
    def decoded(self) -> "SegmentHeader":
        """The header of the same segment, raw again. Raises ValueError for one that is not dense: the rest is gone."""
        if not self.is_dense:
            raise ValueError(f"a {self.codec} segment cannot be made dense again; read it as what it is, or recompute")
        nbytes = self.raw_sealed_bytes - self.head_bytes
        return replace(self, codec=RAW, level=0, profile=b"", body_bytes=nbytes)

    @property
    def key(self) -> bytes:
        """The hash of the last block."""
        return self.block_hashes[-HASH_BYTES:]

    @property
    def num_blocks(self) -> int:
        """How many blocks the segment has."""
        return len(self.block_hashes) // HASH_BYTES

    def block_hash(self, number: int) -> bytes:
        """Return the hash of one of the segment's blocks, counted from 0."""
        return self.block_hashes[HASH_BYTES * number : HASH_BYTES * (number + 1)]

    @property
    def head_bytes(self) -> int:
        """Size of the header and the hashes."""
        return HEADER_BYTES + len(self.block_hashes)

    @property
    def body_offset(self) -> int:
        """Where the first layer's section begins."""
        if self.codec == RAW:
            return body_offset(self.shape, self.dtype, self.num_blocks)
        return coded_body_offset(self.shape[0], self.num_blocks)

    @property
    def span(self) -> SegmentSpan:
        """The segment's name and place, as the index knows it."""
        parent = None if self.parent is None else SegmentKey(self.parent)
        hashes = self.block_hashes
        marks = b"".join([hashes[at : at + MARK_BYTES] for at in range(0, len(hashes), HASH_BYTES)])
        return SegmentSpan(
            SegmentKey(self.key), parent, self.start_block, self.num_blocks, self.kind, marks, self.tenant
        )

    @property
    def sealed_bytes(self) -> int:
        """Size of the segment as it is stored, head included."""
        return self.head_bytes + self.body_bytes

    @property
    def raw_sealed_bytes(self) -> int:
        """Size of the segment where it is stored raw, head included."""
        return sealed_bytes(self.shape, self.dtype, self.num_blocks)


def _is_tag(tenant: str) -> bool:
    return len(tenant) == 2 * TENANT_BYTES and set(tenant) <= set("0123456789abcdef") and set(tenant) != {"0"}
