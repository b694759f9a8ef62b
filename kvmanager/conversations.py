"""The conversations that are silent now: found again by the hashes that their next prompt begins with."""

from collections import OrderedDict
from collections.abc import Iterator, Sequence

from kvmanager.keys import BlockHash
from kvmanager.score_heap import OUTSIDE

HASH_BYTES = 32
MOST_RUNNING = 65_536
"""Requests whose turn number is remembered until their answer ends; some ends are never told."""


class Alarm:
    """A conversation's place in a heap of times: it lies in two heaps, and each needs a position."""

    __slots__ = ("conversation", "position")

    def __init__(self, conversation: "Conversation") -> None:
        self.conversation = conversation
        self.position = OUTSIDE


class Conversation:
    """One silent conversation. ``replica`` is where its next turn will be routed."""

    __slots__ = (
        "age",
        "alarm",
        "blocks",
        "digests",
        "is_promoted",
        "keys",
        "not_before",
        "order_id",
        "pinned_until",
        "position",
        "replica",
        "score",
        "silent_since",
        "turn",
    )

    def __init__(self, replica: str, hashes: Sequence[BlockHash], keys: tuple[BlockHash, ...], turn: int, now: float):
        self.replica = replica
        self.blocks = len(hashes)
        self.digests = b"".join(hashes)
        """All its block hashes in one piece: half the memory of a list."""
        self.keys = keys
        self.turn = turn
        """How many answers it has had."""
        self.silent_since = now
        self.age = 0
        self.score = 0.0
        self.position = OUTSIDE
        self.alarm = Alarm(self)
        self.order_id = 0
        """The order under way, 0 for none."""
        self.pinned_until = 0.0
        """0: not pinned."""
        self.is_promoted = False
        """Whether a promotion has brought it to the device during this silence."""
        self.not_before = now

    def hashes(self) -> list[BlockHash]:
        """Return the hashes of its full blocks, from block 0."""
        digests = self.digests
        return [BlockHash(digests[at : at + HASH_BYTES]) for at in range(0, len(digests), HASH_BYTES)]

    def last_hash(self) -> BlockHash:
        """Return the hash that stands for all of it: blocks leave a device children first."""
        return BlockHash(self.digests[-HASH_BYTES:])


class Conversations:
    """Silent conversations, oldest first, at most ``most_blocks`` blocks of them. One thread."""

    def __init__(self, most_blocks: int) -> None:
        self._most_blocks = most_blocks
        self._blocks = 0
        self._silent: dict[Conversation, None] = {}
        self._by_key: dict[BlockHash, Conversation] = {}
        self._turns_running: OrderedDict[BlockHash, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._silent)

    def __iter__(self) -> Iterator[Conversation]:
        return iter(self._silent)

    @property
    def blocks(self) -> int:
        """Blocks of all of them."""
        return self._blocks

    def find(self, hashes: Sequence[BlockHash]) -> tuple[Conversation, int] | None:
        """Return the conversation that a prompt continues, and how many of its first blocks are that conversation's.

        Of several, the one that covers most of the prompt. O(len(hashes)).
        """
        by_key = self._by_key
        if by_key:
            for end in range(len(hashes), 0, -1):
                found = by_key.get(hashes[end - 1])
                if found is not None:
                    return found, end
        return None

    def runs(self, hashes: Sequence[BlockHash], turn: int) -> None:
        """Remember that the prompt with these blocks is a conversation's ``turn``-th, until `add`."""
        running = self._turns_running
        running[hashes[-1]] = turn
        running.move_to_end(hashes[-1])
        if len(running) > MOST_RUNNING:
            running.popitem(last=False)

    def add(
        self, replica: str, hashes: Sequence[BlockHash], prompt_blocks: int, now: float
    ) -> tuple[Conversation, list[Conversation], list[Conversation]]:
        """Remember an answered conversation; return it, and those that are forgotten: equal ones, and the oldest.

        ``hashes`` are the full blocks of prompt and answer, the first ``prompt_blocks`` of them the prompt's. A next
        prompt may lack the answer's tokens as they were sampled, so the end of the prompt is a key too.
        """
        ends = [hashes[-1]]
        turn = 1
        if 0 < prompt_blocks <= len(hashes):
            turn = self._turns_running.pop(hashes[prompt_blocks - 1], 1)
            if prompt_blocks < len(hashes):
                ends.append(hashes[prompt_blocks - 1])
        conversation = Conversation(replica, hashes, tuple(ends), turn, now)
        equal = [other for end in ends if (other := self._by_key.get(end)) is not None and self.discard(other)]
        for end in ends:
            self._by_key[end] = conversation
        self._silent[conversation] = None
        self._blocks += conversation.blocks
        oldest: list[Conversation] = []
        while self._blocks > self._most_blocks:
            oldest.append(next(iter(self._silent)))
            self.discard(oldest[-1])
        return conversation, equal, oldest

    def discard(self, conversation: Conversation) -> bool:
        """Forget a conversation; return whether it was known."""
        if conversation not in self._silent:
            return False
        del self._silent[conversation]
        self._blocks -= conversation.blocks
        for key in conversation.keys:
            del self._by_key[key]
        return True
