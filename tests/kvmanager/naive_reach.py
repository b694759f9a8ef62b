"""What of a prompt lies in segments, by the block: whatever these are and however they were cut."""

from dataclasses import replace
from itertools import takewhile

from kvmanager.segments.spans import split_segments


def blocks(naive, key):
    """The marks of a segment's blocks."""
    marks = naive.known[key].marks
    return [marks[at : at + 8] for at in range(0, len(marks), 8)]


class Visits:
    """The keys of the segments whose use a manager's plan counts."""

    def __init__(self, catalog):
        self._use, self._keys = catalog.use, []
        catalog.use = self.use

    def use(self, node):
        self._keys.append(node.key)
        return self._use(node)

    def take(self):
        """Those of the last plan, parents first."""
        found, self._keys = self._keys[::-1], []
        return found


def has_place(naive, span):
    """Whether what holds the block before a segment is known."""
    above = naive.known.get(span.parent)
    return span.parent is None or (above is not None and above.start_block < span.start_block <= above.end_block)


def reach(naive, hashes, keys):
    """How many leading blocks lie in segments, by the block: whatever these are and however they were cut."""
    held = {block for key in keys for block in blocks(naive, key)}
    return next((number for number, block in enumerate(hashes) if block[:8] not in held), len(hashes))


def part(naive, hashes, key):
    """Where a segment's part of a prompt ends; where it starts if it has none."""
    start = naive.known[key].start_block
    shared = takewhile(lambda pair: pair[0] == pair[1][:8], zip(blocks(naive, key), hashes[start:], strict=False))
    return start + len(list(shared))


def check_path(naive, hashes, steps):
    """Check that ``steps``, (key, end), are segments that a search may find: what is stored, then what is known."""
    stored = naive.stored_anywhere()
    reached = 0
    for key, end in steps:
        eligible = stored if reached < reach(naive, hashes, stored) else naive.known.keys()
        ends = {other: part(naive, hashes, other) for other in eligible if naive.known[other].start_block <= reached}
        begins = {other: ends[other] for other in ends if naive.known[other].start_block == reached}
        furthest = max(begins.values(), default=0)
        furthest = furthest if furthest > reached else max(ends.values())
        assert furthest == end > reached
        assert (begins if max(begins.values(), default=0) > reached else ends)[key] == end
        reached = end
    assert reached == reach(naive, hashes, naive.known)


def nothing_is_cut_twice(naive, location, hashes, spans):
    """Check that new segments begin where what the location has or is promised parts, and reach the end."""
    upheld = {key for key, copy in naive.copies[location].items() if copy.state != "doomed"}
    reached = reach(naive, hashes, upheld)
    for span in spans:
        assert span.start_block == reached
        assert span.marks == b"".join(block[:8] for block in hashes[reached : span.end_block])
        reached = span.end_block
    assert reached == len(hashes)


def cut(naive, hashes, tenant, start, num_prompt):
    """Return segments of a prompt from the last known block up to ``start`` on, inside a known segment too."""
    for first in range(min(start, len(hashes)) if start % 3 else 0, 0, -1):
        spans = split_segments(hashes, first, len(hashes), naive.blocks_per_segment, num_prompt, tenant)
        above = sorted(
            key
            for key, span in naive.known.items()
            if span.start_block < first <= part(naive, hashes, key) and key not in [s.key for s in spans[:1]]
        )
        if above:
            return [replace(span, parent=above[start % len(above)]) for span in spans[:1]] + spans[1:]
    return split_segments(hashes, 0, len(hashes), naive.blocks_per_segment, num_prompt, tenant)
