"""Segments: runs of consecutive full blocks, the unit of storing, moving and evicting.

A sequence is cut at every multiple of ``blocks_per_segment`` and where its prompt ends. The fixed cuts let two
sequences that share a prefix share its segments; the cut at the prompt's end keeps what the model sampled in nodes of
its own. The index relies on the fixed cuts: no segment crosses one, so whatever reaches past a cut has an ancestor
that ends at it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvmanager.segments.keys import HASH_BYTES, BlockHash, SegmentKey, state_name

MARK_BYTES = 8
"""Of each block's hash: what the index tells blocks apart by. A loader compares whole hashes."""


class NodeKind(Enum):
    """Where the tokens of a segment came from, or that it has none."""

    REQUEST = "request"
    """They came in a prompt."""
    ANSWER = "answer"
    """The model sampled at least one of them."""
    STATE = "state"
    """It holds a model's states behind the block before it: one block in the sequence, and no tokens."""


@dataclass(frozen=True, slots=True)
class SegmentSpan:
    """A segment's name and its place in the sequence. Raises ValueError when the place contradicts itself."""

    key: SegmentKey
    parent: SegmentKey | None
    """Key of the segment that holds the block before this one's first; None exactly for block 0."""
    start_block: int
    num_blocks: int
    kind: NodeKind
    marks: bytes
    """The first `MARK_BYTES` of the hash of each of its blocks, joined."""
    tenant: str = ""
    """Tag of the tenant (`kvmanager.segments.keys.tenant_tag`), for quotas; empty: not known."""

    def __post_init__(self) -> None:
        if self.num_blocks < 1 or self.start_block < 0:
            raise ValueError(f"a segment holds at least one block from block 0 on, got {self}")
        if (self.parent is None) != (self.start_block == 0):
            raise ValueError(f"exactly the segment at block 0 has no parent, got {self}")
        if self.parent == self.key:
            raise ValueError(f"a segment does not follow on itself, got {self}")
        if len(self.marks) != MARK_BYTES * self.num_blocks or self.marks[-MARK_BYTES:] != self.key[:MARK_BYTES]:
            raise ValueError(f"a segment has a mark per block, the last one its key's, got {self}")

    @property
    def end_block(self) -> int:
        """First block after the segment."""
        return self.start_block + self.num_blocks


def join_marks(hashes: Sequence[BlockHash]) -> bytes:
    """Return the marks of consecutive blocks, joined. O(blocks). Raises ValueError for hashes of another length."""
    joined = b"".join(hashes)
    if len(joined) != HASH_BYTES * len(hashes):
        raise ValueError(f"{len(hashes)} hashes have {HASH_BYTES} bytes each, got {len(joined)} in all")
    # A strided copy takes a fraction of the time of a slice of each hash, which were a sixth of a long prompt's plan.
    return memoryview(joined).cast("Q")[:: HASH_BYTES // MARK_BYTES].tobytes()


def cut_ends(start_block: int, end_block: int, blocks_per_segment: int, num_prompt_blocks: int) -> list[int]:
    """Return where the segments end into which blocks ``[start_block, end_block)`` of a sequence are cut."""
    if blocks_per_segment < 1:
        raise ValueError(f"blocks_per_segment must be at least 1, got {blocks_per_segment}")
    ends: list[int] = []
    start = start_block
    while start < end_block:
        end = min(end_block, (start // blocks_per_segment + 1) * blocks_per_segment)
        if start < num_prompt_blocks:
            end = min(end, num_prompt_blocks)
        ends.append(end)
        start = end
    return ends


def split_segments(
    hashes: Sequence[BlockHash],
    start_block: int,
    end_block: int,
    blocks_per_segment: int,
    num_prompt_blocks: int,
    tenant: str = "",
) -> list[SegmentSpan]:
    """Cut blocks ``[start_block, end_block)`` of a sequence into segments, in order.

    ``start_block`` is where a stored segment ends (or 0), ``num_prompt_blocks`` the number of blocks that lie wholly in
    the prompt, ``tenant`` the tag of the tenant. The last segment may be short. Raises ValueError when the range does
    not lie in ``hashes``.
    """
    if not 0 <= start_block <= end_block <= len(hashes):
        raise ValueError(f"blocks [{start_block}, {end_block}) do not lie in a sequence of {len(hashes)} hashed blocks")
    spans: list[SegmentSpan] = []
    start = start_block
    for end in cut_ends(start_block, end_block, blocks_per_segment, num_prompt_blocks):
        spans.append(
            SegmentSpan(
                key=SegmentKey(hashes[end - 1]),
                parent=SegmentKey(hashes[start - 1]) if start else None,
                start_block=start,
                num_blocks=end - start,
                kind=_kind(hashes, start, end, num_prompt_blocks),
                marks=join_marks(hashes[start:end]),
                tenant=tenant,
            )
        )
        start = end
    return spans


def _kind(hashes: Sequence[BlockHash], start: int, end: int, num_prompt_blocks: int) -> NodeKind:
    if end - start == 1 and start and hashes[start] == state_name(hashes[start - 1]):
        return NodeKind.STATE
    return NodeKind.REQUEST if end <= num_prompt_blocks else NodeKind.ANSWER
