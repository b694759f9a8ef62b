"""Which rank a block of a device has by its uses: what was used once leaves before what comes back.

A segmented LRU (Karedla, Love and Wherry, *Caching Strategies to Improve Disk System Performance*, IEEE Computer 1994)
with a third segment by frequency. Each rank above the first has a share of the device; what it has no room for falls to
the end of the rank below, so it is not gone before a second time. A scan of prompts that come once passes through the
first rank only. What a returning prompt brings with it is expected to return as its beginning did: a conversation's
next turn wants the whole of the turn before. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import IntEnum


class Rank(IntEnum):
    """Where a free block waits for its eviction; lower ranks go first."""

    ONCE = 1
    """Used once, or long ago; what was used least recently goes first."""
    AGAIN = 2
    """Used again, or the rest of a prompt that was; by recency, too."""
    HOT = 3
    """Used often; what the manager counts as coldest goes first."""


SHARES = {Rank.AGAIN: 0.4, Rank.HOT: 0.1}
"""Of a device's blocks, how many may be free in a rank. Tuned on mixes of conversations, documents and scans."""
AGAIN_USES, HOT_USES = 1.5, 7.5
"""Decayed uses that a rank begins with: a second use within a half-life, and eight."""
TWICE = 1.0
"""How much more two uses score than one (`kvmanager.index.hotness`)."""
RETURNING_SHARE = 0.25
"""Of a sequence's blocks: where as many were known before, it is one that comes back, and not a system prompt alone."""

_AGAIN, _HOT = math.log2(AGAIN_USES), math.log2(HOT_USES)


def rank_of(score: float, now: float) -> Rank:
    """Return the rank of a block of this score; `now` is the score of one use."""
    uses = score - now
    if uses < _AGAIN:
        return Rank.ONCE
    return Rank.AGAIN if uses < _HOT else Rank.HOT


def score_of_rest(scores: Sequence[tuple[int, float]], blocks: int, now: float) -> float:
    """Return the score of what follows the known blocks of a sequence of `blocks` blocks, `(end_block, score)` each.

    One use made now; two at most where the sequence comes back, and never more than what it follows.
    """
    if not scores or scores[-1][0] < RETURNING_SHARE * blocks:
        return now
    return max(now, min(now + TWICE, scores[-1][1]))
