"""What people order of one prompt's KV in the shared tiers: an eviction, or a copy at Redis; and what either would do.

*Evicted* is what only this prompt needs: its last segment that a location has, all that follows on it there, and going
up from it all that nothing else follows on. So a beginning that other prompts share stays. A pinned prompt is refused.
A model's states alone are no other prompt: they go with what they follow on. What is leased leaves when its lease ends,
as with every eviction (`kvmanager.index.sweeps`).

*Compressed* means that Redis has it, in the coding that the deployment stores with: the segments that a CPU tier has
are put before all that waits to be copied there (`kvmanager.moves.demotions`), and the states that the prompt is loaded
with. The copies in the CPU tier stay.

Every count is bounded: of what would be evicted `MOST_COUNTED` copies are walked through. One thread.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from kvmanager.index.locations import REDIS, Location, Tier
from kvmanager.index.nodes import Copy, CopyState, Node
from kvmanager.index.stores import Store
from kvmanager.moves.chain_search import ChainSearch
from kvmanager.moves.demotions import Demotions
from kvmanager.moves.due_evictions import DueEvictions
from kvmanager.segments.keys import BlockHash, SegmentKey
from kvmanager.segments.spans import NodeKind

MOST_COUNTED = 8_192


class PinnedError(ValueError):
    """A pin keeps what was to be evicted. Nothing was changed."""


class NoRedisError(ValueError):
    """There is no Redis that anything could be copied to."""


class Amount(NamedTuple):
    """A number of segments and bytes; a lower bound unless ``complete``."""

    segments: int = 0
    nbytes: int = 0
    complete: bool = True

    def __add__(self, other: object) -> "Amount":
        """Return the sum of both."""
        assert isinstance(other, Amount)
        return Amount(self.segments + other.segments, self.nbytes + other.nbytes, self.complete and other.complete)


@dataclass(frozen=True, slots=True)
class Compressed:
    """How far the copying of a prompt to Redis is."""

    segments: int
    """Of the prompt, that a CPU tier or Redis has."""
    stored: int
    """Of these, at Redis."""
    waiting: int
    """Of these, on their way there, or about to be."""
    raw_bytes: int
    """Of those at Redis, what they take uncoded."""
    coded_bytes: int
    """And what they take there."""


class PromptOrders:
    """See the module's docstring."""

    def __init__(
        self, stores: Mapping[Location, Store], search: ChainSearch, demotions: Demotions, due: DueEvictions
    ) -> None:
        self._stores = stores
        self._search = search
        self._demotions = demotions
        self._due = due

    def own_from(self, hashes: Sequence[BlockHash]) -> int:
        """Return the first block of a prompt that no other known prompt shares; 0 for a prompt that is not known."""
        path = self.path_of(hashes)
        if not path:
            return 0
        node = path[-1]
        while node.parent is not None and not _goes_on_otherwise(node.parent, node):
            node = node.parent
        return node.start_block

    def path_of(self, hashes: Sequence[BlockHash]) -> list[Node]:
        """Return the known segments that lie wholly in a prompt, parents first. O(segments of the prompt)."""
        path, ends, _ = self._search.find(hashes)
        return [node for node, end in zip(path, ends, strict=True) if node.end_block == end]

    def path_to(self, key: SegmentKey, tenant: str | None) -> list[Node]:
        """Return a known segment of a tenant (by tag; None: of any tenant) behind all that it follows on.

        Empty: there is none. O(result).
        """
        node = self._demotions.catalog.trie.nodes.get(key)
        path: list[Node] = []
        while node is not None and tenant in (None, node.tenant):
            path.append(node)
            node = node.parent
        return path[::-1]

    def would_evict(self, tier: Tier, path: Sequence[Node]) -> Amount:
        """Return what `evict` would take from a tier. Raises `PinnedError`. O(segments of the prompt), and bounded."""
        return sum((_below(head) for head in self._heads(tier, path)), Amount())

    def evict(self, tier: Tier, path: Sequence[Node]) -> Amount:
        """Take what only the prompt of a path needs out of a tier; `KVManager.expire` orders it.

        Returns how much, at least. Raises `PinnedError`.
        """
        heads = self._heads(tier, path)
        amount = sum(map(_below, heads), Amount())
        self._due.add(self._demotions.catalog.uproot_all(heads, bytes_lost=False))
        return amount

    def compress(self, hashes: Sequence[BlockHash]) -> Compressed:
        """Let what CPU tiers have of a prompt be copied to Redis before all else. Raises `NoRedisError`."""
        redis = self._stores.get(REDIS)
        if redis is None or not redis.budget_bytes:
            raise NoRedisError("there is no Redis to copy to")
        self._demotions.order(node for node in self._loaded(hashes) if node.copy_at(redis) is None)
        return self.compressed(hashes)

    def compressed(self, hashes: Sequence[BlockHash]) -> Compressed:
        """Return how far that is. O(segments of the prompt)."""
        redis = self._stores.get(REDIS)
        segments = stored = waiting = raw_bytes = coded_bytes = 0
        for node in self._loaded(hashes):
            there = None if redis is None else node.copy_at(redis)
            if there is not None and there.resident:
                stored += 1
                raw_bytes += node.nbytes
                coded_bytes += there.nbytes
            elif (there is not None and there.state in (CopyState.RESERVED, CopyState.HELD)) or (
                self._demotions.is_ordered(node.key)
            ):
                waiting += 1
            elif not any(copy.resident for copy in node.all_copies()):
                continue
            segments += 1
        return Compressed(segments, stored, waiting, raw_bytes, coded_bytes)

    def _loaded(self, hashes: Sequence[BlockHash]) -> list[Node]:
        """Return the known segments of a prompt, and, of a model with states, the stored ones that it is loaded with.

        Those are the last ones, and, where these may be behind its last token, the ones before them. O(blocks) hashes,
        but of a model without states none.
        """
        path = self.path_of(hashes)
        if not any(store.states.segments for store in self._stores.values()):
            return path
        nodes = self._demotions.catalog.trie.nodes
        known = {end: nodes[name] for end, name in self._search.known_states(hashes).items()}
        stored = {end: node for end, node in known.items() if any(copy.resident for copy in node.all_copies())}
        return [*path, *islice(stored.values(), 2 if len(hashes) in stored else 1)]

    def _heads(self, tier: Tier, path: Sequence[Node]) -> list[Copy]:
        found = (_head(store, path) for location, store in self._stores.items() if location.tier is tier)
        return [head for head in found if head is not None]


def _head(store: Store, path: Iterable[Node]) -> Copy | None:
    """Return the copy with which goes all that only this prompt needs here; None: nothing of it is here."""
    copies = [copy for node in path if (copy := node.copy_at(store)) is not None and copy.resident]
    if not copies:
        return None
    head = copies[-1]
    if head.node.pins:
        raise PinnedError("the prompt, or one that begins with it, is pinned; unpin it first")
    while (node := head.node.parent) is not None:
        parent = node.copy_at(store)
        if parent is None or not parent.resident or node.pins or _upholds_others(parent, head):
            break
        head = parent
    return head


def _goes_on_otherwise(node: Node, child: Node) -> bool:
    """Return whether other tokens than a child's follow on a node. O(blocks of the node): it has no more states."""
    return any(other is not child and other.kind is not NodeKind.STATE for other in node.children())


def _upholds_others(parent: Copy, child: Copy) -> bool:
    """Return whether another copy than a child counts on a copy, states left aside; where that is not known: True."""
    others = parent.children - 1
    for node in islice(parent.node.children(), MOST_COUNTED) if others else ():
        copy = node.copy_at(parent.store)
        if copy is None or copy is child or not copy.upholds:
            continue
        if node.kind is not NodeKind.STATE:
            return True
        others -= 1
    return others > 0


def _below(head: Copy) -> Amount:
    """Count a copy and the copies that depend on it, at most `MOST_COUNTED`."""
    store, segments, nbytes = head.store, 0, 0
    stack: list[Node | None] = [head.node]
    looked_at = 0
    while stack:
        node = stack.pop()
        if node is None:
            continue
        if looked_at == MOST_COUNTED:
            return Amount(segments, nbytes, complete=False)
        looked_at += 1
        if node is not head.node:
            stack.append(node.next_sibling)
        copy = node.copy_at(store)
        if copy is not None and copy.upholds:
            segments += 1
            nbytes += copy.nbytes
            stack.append(node.first_child)
    return Amount(segments, nbytes)
