"""Cuts: the segments in which a location stores what a replica has computed of a sequence.

New segments begin where what the location upholds parts from the sequence, inside a segment too: what is stored there
already is not stored twice. From there the sequence is cut at every multiple of ``blocks_per_segment`` and at its
prompt's end, unless a known segment lies wholly in it: that is taken as it is, so that locations share cuts. One
thread.
"""

from collections.abc import Sequence
from dataclasses import replace

from kvmanager.index.nodes import Copy, Node
from kvmanager.index.stores import Store
from kvmanager.index.trie import PrefixTrie
from kvmanager.segments.keys import BlockHash, SegmentKey
from kvmanager.segments.spans import MARK_BYTES, SegmentSpan, cut_ends, join_marks, split_segments


def cut_sequence(
    trie: PrefixTrie,
    store: Store,
    hashes: Sequence[BlockHash],
    first_block: int,
    end_block: int,
    blocks_per_segment: int,
    num_prompt_blocks: int,
    tenant: str,
) -> list[SegmentSpan]:
    """Return the segments for ``store`` of blocks ``[first_block, end_block)`` that a replica has, parents first.

    Empty where the parent of the first one is not known. Where only other locations have that parent they are named all
    the same: they are refused, and remembered. Raises ValueError when the range does not lie in ``hashes``. O(blocks).
    """
    if not 0 <= first_block <= end_block <= len(hashes):
        raise ValueError(f"blocks [{first_block}, {end_block}) do not lie in a sequence of {len(hashes)} hashed blocks")
    marks = join_marks(hashes[:end_block])

    def upheld(node: Node) -> Copy | None:
        copy = node.copy_at(store)
        return copy if copy is not None and copy.upholds else None

    runs, ends, _ = trie.runs.path(marks, blocks_per_segment, upheld)
    above, start = (runs[-1], ends[-1]) if runs else (None, 0)
    if start < first_block:
        beyond, beyond_ends, _ = trie.runs.path(marks, blocks_per_segment, _known, start)
        above, start = next(
            (step for step in zip(beyond, beyond_ends, strict=True) if step[1] >= first_block), (None, end_block)
        )
    parent = None if above is None else above.key
    spans: list[SegmentSpan] = []
    while start < end_block:
        span = _known_span(trie, hashes, marks, start, parent)
        if span is None:
            end = cut_ends(start, end_block, blocks_per_segment, num_prompt_blocks)[0]
            (span,) = split_segments(hashes, start, end, blocks_per_segment, num_prompt_blocks, tenant)
            span = replace(span, parent=parent)
        spans.append(span)
        start, parent = span.end_block, span.key
    return spans


def _known_span(
    trie: PrefixTrie, hashes: Sequence[BlockHash], marks: bytes, start: int, parent: SegmentKey | None
) -> SegmentSpan | None:
    """Return the longest known segment that begins at a block and lies wholly in the sequence."""
    at = start * MARK_BYTES
    found: Node | None = None
    for node in trie.runs.twins(marks[at : at + MARK_BYTES]):
        longer = found is None or node.num_blocks > found.num_blocks
        if longer and marks.startswith(node.marks, at) and SegmentKey(hashes[node.end_block - 1]) == node.key:
            found = node
    if found is None:
        return None
    moves = found.copies is None and not found.pins  # a ghost follows on whatever holds the block before it
    return replace(found.span, parent=parent) if moves else found.span


def _known(node: Node) -> Node:
    """All that is known counts."""
    return node
