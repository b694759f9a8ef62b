"""When a prefix is hotter than one replica can serve: give it another home before a request has to compute it there.

A prompt is *pressing* when the replica that holds most of it is so busy that it would have its first token sooner
elsewhere, recomputed. Whether it waits or goes there is up to the router. Once is chance. When prompts of the same
prefix press again and again, its holders cannot serve it alone, and the replica that would serve it soonest is worth
being given a copy: a `Spread`. What comes after finds it there, and nothing was computed twice. A prefix that a shared
tier holds presses no replica: the one that gets a prompt loads it from there, which spreads it without an order.

The prefix in question is not the whole of what the holder has of one prompt, which ends with that user's own
conversation, but the longest part that the pressing prompts have in common: each of them counts for every cut of the
prefix, and the deepest cut with enough of them is what moves. Counts halve every ``half_life_s``. A cut that has not
pressed for `FORGOTTEN` half-lives leaves the table; so does the longest untouched one when there are more than
`MOST_CUTS`. One thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from math import exp2
from typing import NamedTuple

from kvmanager.routing.mirror import TierHits
from kvmanager.segments.keys import BlockHash

ENOUGH = 2.5
"""Pressing prompts of one prefix, decayed, before it moves: the third in a row."""
MOST_CUTS = 20_000
FORGOTTEN = 20.0
"""Half-lives: a millionth of a count is left."""


class Spread(NamedTuple):
    """An order: let the device of ``target`` have the prefix that ``hashes`` names, which ``source``'s device has.

    From wherever it is nearest: a shared tier, or ``source``.
    """

    hashes: tuple[BlockHash, ...]
    source: str
    target: str


class Spreading:
    """Counts pressing prompts, and says what to move. Times are seconds on any clock that does not jump."""

    def __init__(self, blocks_per_segment: int, half_life_s: float = 10.0) -> None:
        """Prefixes below a segment are computed sooner than moved."""
        self._cut = blocks_per_segment
        self._half_life_s = half_life_s
        self._pressing: OrderedDict[BlockHash, tuple[float, float]] = OrderedDict()
        """Decayed count and its time, by the last block of the cut."""

    def consider(
        self,
        now: float,
        hashes: Sequence[BlockHash],
        chosen: str,
        waits: Mapping[str, float],
        hits: Mapping[str, TierHits],
    ) -> list[Spread]:
        """Note a routed prompt: where it goes, and by replica how long it would wait and what is held of it.

        Returns what to move, if anything, to the replica with the shortest wait that would have to compute it;
        ``chosen`` gets the prefix with the prompt. O(segments + replicas log replicas).
        """
        holder = max(waits, key=lambda replica: (hits[replica].device, -waits[replica]))
        soonest = min(waits, key=waits.__getitem__)
        held = hits[holder].device // self._cut * self._cut
        if waits[soonest] >= waits[holder] or held - sum(hits[soonest]) < self._cut:
            return []
        common = 0
        for end in range(self._cut, held + 1, self._cut):
            if self._count(now, hashes[end - 1]) >= ENOUGH:
                common = end
        for target in sorted(waits, key=waits.__getitem__):
            if waits[target] >= waits[holder]:
                break
            if target != chosen and common - sum(hits[target]) >= self._cut:
                for end in range(self._cut, common + 1, self._cut):
                    self._pressing.pop(hashes[end - 1], None)  # the next home takes new evidence
                return [Spread(tuple(hashes[:common]), holder, target)]
        return []

    def _count(self, now: float, block: BlockHash) -> float:
        count, then = self._pressing.pop(block, (0.0, now))
        count = 1.0 + count * exp2(min(0.0, then - now) / self._half_life_s)
        self._pressing[block] = count, now
        forgotten = now - FORGOTTEN * self._half_life_s
        while len(self._pressing) > MOST_CUTS or next(iter(self._pressing.values()))[1] < forgotten:
            self._pressing.popitem(last=False)
        return count
