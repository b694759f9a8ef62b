"""Prompts so short that computing them is faster than loading anything: not planned, and not saved at first sight.

The manager says with each plan how long such prompts may be (`kvmanager.loading.load_choice`). That is believed for
`TRUST_S`, and one in `ASK_EVERY` of them is planned all the same, so that the answer stays young.

A sequence that is as short may still become the beginning of something longer. So it is saved once it has grown, its
answer included, to what is worth a load; a conversation's second turn at the latest does that. And those of its leading
blocks are saved that have come before (`RepeatedBlocks`): a system prompt. One thread.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from math import inf

TRUST_S = 30.0
ASK_EVERY = 32
UNMEASURED_BLOCKS = 4
"""Shorter sequences, in blocks, are not saved at first sight while it is not known what is worth a load."""
MOST_REMEMBERED = 16_384
"""Blocks of short prompts; about 2 MB."""


class ShortPrompts:
    """See the module's docstring. Times are seconds on any clock that does not jump."""

    def __init__(self) -> None:
        self.below_tokens = 0
        """What the manager said last; 0: it does not know."""
        self._heard_at = -inf
        self._skipped = 0

    def heard(self, now: float, below_tokens: int) -> None:
        """Note what the manager said with a plan."""
        self.below_tokens = below_tokens
        self._heard_at = now

    def skips(self, now: float, prompt_tokens: int) -> bool:
        """Whether a prompt is not worth a plan."""
        if prompt_tokens >= self.below_tokens or now - self._heard_at > TRUST_S:
            return False
        self._skipped += 1
        return self._skipped % ASK_EVERY != 0


class RepeatedBlocks:
    """Counts the blocks of short prompts, and forgets those that were not met for longest."""

    def __init__(self, most: int = MOST_REMEMBERED) -> None:
        self._most = most
        self._uses: OrderedDict[bytes, int] = OrderedDict()

    def met(self, hashes: Iterable[bytes]) -> int:
        """Note a prompt's leading blocks; return how many of them to save now. O(blocks).

        That is up to the last one that is met for the second, fourth, eighth … time: what was saved then is not offered
        with every prompt, and what left its tier meanwhile comes back.
        """
        due = 0
        for number, block_hash in enumerate(hashes, start=1):
            uses = self._uses.pop(block_hash, 0) + 1
            self._uses[block_hash] = uses
            if uses > 1 and not uses & (uses - 1):
                due = number
        while len(self._uses) > self._most:
            self._uses.popitem(last=False)
        return due
