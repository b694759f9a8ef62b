"""Segments: runs of consecutive full blocks, the unit of storing, moving and evicting.

A sequence is cut at every multiple of ``blocks_per_segment`` and where its prompt ends. The fixed cuts let two
sequences that share a prefix share its segments; the cut at the prompt's end keeps what the model sampled in nodes of
its own. The index relies on the fixed cuts: no segment crosses one, so whatever reaches past a cut has an ancestor
that ends at it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from kvmanager.segments.keys import BlockHash, SegmentKey


class NodeKind(Enum):
    """Where the tokens of a segment came from."""

    REQUEST = "request"
    """They came in a prompt."""
    ANSWER = "answer"
    """The model sampled at least one of them."""


@dataclass(frozen=True, slots=True)
class SegmentSpan:
    """A segment's name and its place in the sequence. Raises ValueError when the place contradicts itself."""

    key: SegmentKey
    parent: SegmentKey | None
    """Key of the segment that ends where this one starts; None exactly for block 0."""
    start_block: int
    num_blocks: int
    kind: NodeKind
    tenant: str = ""
    """Tag of the tenant (`kvmanager.segments.keys.tenant_tag`), for quotas; empty: not known."""

    def __post_init__(self) -> None:
        if self.num_blocks < 1 or self.start_block < 0:
            raise ValueError(f"a segment holds at least one block from block 0 on, got {self}")
        if (self.parent is None) != (self.start_block == 0):
            raise ValueError(f"exactly the segment at block 0 has no parent, got {self}")

    @property
    def end_block(self) -> int:
        """First block after the segment."""
        return self.start_block + self.num_blocks


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
    if blocks_per_segment < 1:
        raise ValueError(f"blocks_per_segment must be at least 1, got {blocks_per_segment}")
    if not 0 <= start_block <= end_block <= len(hashes):
        raise ValueError(f"blocks [{start_block}, {end_block}) do not lie in a sequence of {len(hashes)} hashed blocks")
    spans: list[SegmentSpan] = []
    start = start_block
    while start < end_block:
        end = min(end_block, (start // blocks_per_segment + 1) * blocks_per_segment)
        if start < num_prompt_blocks:
            end = min(end, num_prompt_blocks)
        spans.append(
            SegmentSpan(
                key=SegmentKey(hashes[end - 1]),
                parent=SegmentKey(hashes[start - 1]) if start else None,
                start_block=start,
                num_blocks=end - start,
                kind=NodeKind.REQUEST if end <= num_prompt_blocks else NodeKind.ANSWER,
                tenant=tenant,
            )
        )
        start = end
    return spans
