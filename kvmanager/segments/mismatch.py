"""Why stored bytes are not the segment that was asked for."""

from enum import StrEnum


class MismatchReason(StrEnum):
    """Why a stored segment was refused; the label of the metric that counts it."""

    TRUNCATED = "truncated"
    MAGIC = "magic"
    VERSION = "version"
    HEADER = "header"
    """The checksum of the header and the block hashes differs, or the fields contradict each other."""
    KEYED = "keyed_checksum"
    """In Redis: damaged, stored under another secret, or put there by a writer that does not know it."""
    KEY = "key"
    FINGERPRINT = "fingerprint"
    SHAPE = "shape"
    DTYPE = "dtype"
    CODEC = "codec"
    """Coded otherwise than the reader reads, or no coded form of this segment at all."""
    KIND = "kind"
    LENGTH = "length"
    CHECKSUM = "checksum"
    """The table's, or that of a layer's section or of a block in it."""
    BLOCK_HASH = "block_hash"
    """Its last block that is used is another than the plan took it for."""
    PROFILE = "profile"
    """The profile that it was coded with is gone, damaged, or another model's."""


class SegmentMismatch(Exception):  # noqa: N818 - an outcome that callers expect, like StopIteration
    """The bytes are not the segment asked for. The caller counts a miss and recomputes the tokens."""

    def __init__(self, reason: MismatchReason) -> None:
        super().__init__(f"stored segment refused: {reason.value} does not match; its tokens must be recomputed")
        self.reason = reason
