"""Offloads: what a device holds that no shared tier has, and which of it is worth a copy before it is overwritten.

A replica saves what it computes, so this is for what was not saved then or is stored no longer: the CPU tier was gone
or full of hotter segments, too many saves were under way, the segment was evicted and has become hot since, or its
parent had left the CPU tier when it was saved, for each tier keeps whole chains: then the parent goes there once more.
`candidates` looks at a few blocks of a device per call and goes round its whole pool in many; `lacking` answers for one
sequence. Both name segments, not blocks: the replica knows which blocks end in a segment's key. One thread.
"""

from collections.abc import Callable, Sequence

from kvmanager.index.catalog import Catalog
from kvmanager.index.device_index import DeviceIndex
from kvmanager.index.hotness import HotnessClock
from kvmanager.index.locations import Location
from kvmanager.index.nodes import Node
from kvmanager.moves.chain_search import ChainSearch
from kvmanager.moves.cuts import cut_sequence
from kvmanager.segments.keys import BlockHash
from kvmanager.segments.spans import SegmentSpan

WORTH_USES = 1.0
"""Decayed uses from which a segment is worth an offload: used just now, or more often a while ago."""
MOST_LOOKED_AT = 256
"""Blocks of a device that one call looks at."""


class Offloads:
    """See the module."""

    def __init__(
        self, catalog: Catalog, search: ChainSearch, devices: DeviceIndex, clock: HotnessClock, blocks_per_segment: int
    ) -> None:
        self._catalog = catalog
        self._trie = catalog.trie
        self._search = search
        self._devices = devices
        self._clock = clock
        self._blocks_per_segment = blocks_per_segment
        self._rounds: dict[str, list[BlockHash]] = {}
        """What of each device is still to be looked at in this round."""
        self._left_out: dict[str, set[BlockHash]] = {}
        """Blocks that lay on each device when the shared tiers were cleared, and still do."""

    def candidates(self, replica: str, most_segments: int, to: Location) -> list[SegmentSpan]:
        """Return the hottest chain of at most ``most_segments`` segments that should be offloaded from a device now.

        Parents first; the first one's parent is stored at ``to``: segments that only others have, and on which those
        follow, come before them and do not count. Empty: nothing among the blocks looked at.
        O(`MOST_LOOKED_AT` + chain), and once per round O(blocks of the device).
        """
        ahead = self._rounds.get(replica)
        if not ahead:
            held = self._devices.held(replica)
            self._rounds = {known: rest for known, rest in self._rounds.items() if self._devices.held(known)}
            self._left_out = {known: left for known, left in self._left_out.items() if self._devices.held(known)}
            left_out = self._left_out.get(replica)
            if left_out:
                left_out.intersection_update(held)
            ahead = self._rounds[replica] = [block for block in held if not left_out or block not in left_out]
        hottest: Node | None = None
        for _ in range(min(MOST_LOOKED_AT, len(ahead))):
            node = self._trie.nodes.get(ahead.pop())
            if node is not None and node.copies is None and (hottest is None or _rank(node) > _rank(hottest)):
                hottest = node
        if hottest is None or self._clock.uses(hottest.score) < WORTH_USES:
            return []
        chain = _unstored_chain(hottest)
        return self._parents(chain[0], to) + chain[:most_segments]

    def leave_out_present(self, tenant: str | None = None) -> None:
        """Make no candidate of what lies on devices now: it was cleared from the shared tiers. O(blocks).

        With a ``tenant`` (by tag), of what is known as its own. A request that uses it saves it again, as it saves
        everything.
        """
        self._rounds.clear()
        for replica, held in self._devices.replicas():
            left_out = self._left_out.setdefault(replica, set())
            left_out.update(held if tenant is None else (block for block in held if self._belongs(block, tenant)))

    def device_blocks(self, replica: str, hashes: Sequence[BlockHash]) -> int:
        """Return how many leading blocks of a sequence a device holds. O(result)."""
        return self._devices.leading_blocks(replica, hashes)

    def lacking(self, replica: str, hashes: Sequence[BlockHash], to: Location) -> list[SegmentSpan]:
        """Return the segments of a sequence's beginning that a device holds and no shared tier has, parents first.

        They are cut for ``to`` (`kvmanager.moves.cuts`), and end where ``hashes`` do or at a fixed cut. Those on which
        they follow and that only others than ``to`` have come before them, as in `candidates`.
        """
        end = self._devices.leading_blocks(replica, hashes)
        if end < len(hashes):
            end -= end % self._blocks_per_segment
        if self._search.reach(hashes[:end]) == end:
            return []
        store = self._catalog.store(to)
        return cut_sequence(self._trie, store, hashes, 0, end, self._blocks_per_segment, len(hashes), "")

    def _belongs(self, block: BlockHash, tenant: str) -> bool:
        """Return whether a block ends a known segment of a tenant; no other block can become a candidate."""
        node = self._trie.nodes.get(block)
        return node is not None and node.tenant == tenant

    def _parents(self, first: SegmentSpan, to: Location) -> list[SegmentSpan]:
        """Return what has to be stored at a location before ``first`` can be, parents first. O(result)."""
        above = None if first.parent is None else self._trie.nodes.get(first.parent)
        return _chain(above, lambda node: _upheld(node, to))


def _rank(node: Node) -> tuple[float, int]:
    """Hottest first; of equals the one that brings most of its chain along."""
    return node.score, node.end_block


def _unstored_chain(node: Node) -> list[SegmentSpan]:
    """Return ``node`` and its ancestors up to the first that is stored anywhere, parents first."""
    return _chain(node, lambda step: step.copies is not None)


def _upheld(node: Node, at: Location) -> bool:
    """Return whether what follows ``node`` may be stored at a location."""
    return any(copy.store.location == at and copy.upholds for copy in node.all_copies())


def _chain(node: Node | None, until: Callable[[Node], bool]) -> list[SegmentSpan]:
    """Return ``node`` and its ancestors up to the first of which something holds, parents first."""
    chain: list[SegmentSpan] = []
    while node is not None and not until(node):
        chain.append(node.span)
        node = node.parent
    chain.reverse()
    return chain
