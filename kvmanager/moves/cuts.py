"""Cuts: into which segments a location shall store what a replica has computed of a sequence.

A sequence is cut where stored segments of it end, at every multiple of ``blocks_per_segment`` and at its prompt's end.
What the index knows is cut as it is known, so that locations share cuts. One thread.
"""

from collections.abc import Sequence

from kvmanager.index.trie import PrefixTrie
from kvmanager.segments.keys import BlockHash
from kvmanager.segments.spans import SegmentSpan, cut_ends, split_segments


def cut_sequence(
    trie: PrefixTrie,
    hashes: Sequence[BlockHash],
    first_block: int,
    end_block: int,
    blocks_per_segment: int,
    num_prompt_blocks: int,
    tenant: str,
) -> list[SegmentSpan]:
    """Return the segments of blocks ``[first_block, end_block)``, in order; ``first_block`` is where one ends, or 0.

    Raises ValueError when the range does not lie in ``hashes``. O(blocks).
    """
    spans: list[SegmentSpan] = []
    start = first_block
    while start < end_block:
        fixed = min(end_block, (start // blocks_per_segment + 1) * blocks_per_segment)
        known = (trie.nodes.get(hashes[end - 1]) for end in range(fixed, start, -1))
        node = next((node for node in known if node is not None and node.start_block == start), None)
        if node is not None:
            spans.append(node.span)
            start = node.end_block
            continue
        end = cut_ends(start, end_block, blocks_per_segment, num_prompt_blocks)[0]
        spans += split_segments(hashes, start, end, blocks_per_segment, num_prompt_blocks, tenant)
        start = end
    return spans
