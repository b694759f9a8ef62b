"""What is wanted on one replica's device: the conversations worth most per block, as far as a budget reaches."""

from collections import Counter
from collections.abc import Iterable, Iterator

from kvmanager.conversations import Conversation
from kvmanager.keys import BlockHash
from kvmanager.score_heap import ScoreHeap

MOST_TRIES = 8
"""Conversations that may find no room in the budget before no more are tried: a large one hides small ones."""


class WantedSet:
    """The wanted ones, and those that wait for room. A conversation is in one set, or in none. One thread."""

    def __init__(self, advantage: float) -> None:
        """``advantage``: so many times more than those whose place it takes must a conversation be worth."""
        self.budget_blocks = 0
        self.blocks = 0
        """Of the wanted ones."""
        self._advantage = advantage
        self._wanted: dict[Conversation, None] = {}
        self._lowest: ScoreHeap[Conversation] = ScoreHeap()
        self._waiting: ScoreHeap[Conversation] = ScoreHeap()
        """Highest first: scores are negated."""

    def __iter__(self) -> Iterator[Conversation]:
        return iter(self._wanted)

    def __contains__(self, conversation: Conversation) -> bool:
        return conversation in self._wanted

    @property
    def room(self) -> int:
        """Blocks of the budget that are free; below zero when the budget has shrunk."""
        return self.budget_blocks - self.blocks

    def offer(self, conversation: Conversation) -> None:
        """Let a conversation with a new ``score`` be chosen; a wanted one stays wanted until `choose`."""
        if conversation in self._wanted:
            self._lowest.update(conversation, conversation.score)
            return
        self._waiting.discard(conversation)
        if conversation.blocks <= self.budget_blocks:
            self._waiting.push(conversation, -conversation.score)

    def remove(self, conversation: Conversation) -> None:
        """Let go of a conversation, wanted or not; one that is in no set stays as it is."""
        if conversation in self._wanted:
            del self._wanted[conversation]
            self.blocks -= conversation.blocks
            self._lowest.discard(conversation)
        else:
            self._waiting.discard(conversation)

    def choose(self) -> list[Conversation]:
        """Make those wanted that are worth most; return those that are wanted no longer.

        O(log n) for each that changes sides, and for `MOST_TRIES` more.
        """
        dropped: list[Conversation] = []
        while self.room < 0 and (least := self._lowest.lowest()) is not None:
            self.remove(least)
            dropped.append(least)
        unlucky: list[Conversation] = []
        while len(unlucky) < MOST_TRIES and (best := self._waiting.lowest()) is not None:
            self._waiting.discard(best)
            room_makers = self._room_makers(best)
            if room_makers is None:
                unlucky.append(best)
                continue
            dropped += room_makers
            self._want(best)
        for conversation in unlucky + dropped:
            self.offer(conversation)
        return dropped

    def _want(self, conversation: Conversation) -> None:
        self._wanted[conversation] = None
        self.blocks += conversation.blocks
        self._lowest.push(conversation, conversation.score)

    def _room_makers(self, newcomer: Conversation) -> list[Conversation] | None:
        """Take out wanted conversations that are worth less until there is room enough; None: there never is.

        Then nothing is changed.
        """
        out: list[Conversation] = []
        while self.room < newcomer.blocks:
            least = self._lowest.lowest()
            if least is None or least.score * self._advantage > newcomer.score:
                for conversation in out:
                    self._want(conversation)
                return None
            self.remove(least)
            out.append(least)
        return out


class PinCounts:
    """How many wanted conversations each pinned block belongs to: a device pins a block once, for whoever needs it."""

    def __init__(self) -> None:
        self._counts: Counter[BlockHash] = Counter()

    def add(self, hashes: Iterable[BlockHash]) -> None:
        """Note that a conversation's blocks are pinned."""
        self._counts.update(hashes)

    def take(self, hashes: Iterable[BlockHash]) -> list[BlockHash]:
        """Note that a conversation needs its pins no more; return those of them that nobody else needs, in order."""
        over: list[BlockHash] = []
        for block in hashes:
            self._counts[block] -= 1
            if self._counts[block] <= 0:
                del self._counts[block]
                over.append(block)
        return over
