"""How far a prompt follows a set of prefixes that are named by where segments end."""

from collections.abc import Callable, Sequence

from kvmanager.segments.keys import BlockHash


def prefix_reach(hashes: Sequence[BlockHash], blocks_per_segment: int, holds: Callable[[BlockHash], bool]) -> int:
    """Return the largest n for which a held segment ends after the first n blocks of ``hashes`` (0 for none).

    ``holds`` tells whether a set of segments contains a key. The set must be closed: it contains the parent of each
    segment in it, and no segment crosses a multiple of ``blocks_per_segment`` (a cut). Then a cut is reached exactly if
    all cuts before it are, so the last one is found by bisection and only the blocks up to the next cut are tried one
    by one: O(log(len(hashes) / blocks_per_segment) + blocks_per_segment) look-ups.
    """
    low, high = 0, len(hashes) // blocks_per_segment
    while low < high:
        middle = (low + high + 1) // 2
        if holds(hashes[middle * blocks_per_segment - 1]):
            low = middle
        else:
            high = middle - 1
    reached = low * blocks_per_segment
    for end in range(min(len(hashes), reached + blocks_per_segment - 1), reached, -1):
        if holds(hashes[end - 1]):
            return end
    return reached
