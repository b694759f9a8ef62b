"""Where the segments of a sequence lie: the stored ones that begin it, and what is known beyond them.

Counts no use and changes nothing. O(segments of the sequence). One thread.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from kvmanager.index.catalog import Catalog
from kvmanager.index.locations import Tier
from kvmanager.index.nodes import Copy, CopyState, Node
from kvmanager.segments.keys import BlockHash, SegmentKey, state_name
from kvmanager.segments.spans import join_marks

Serves: TypeAlias = Callable[[bytes], bool]
"""Says whether a copy of a form (`kvmanager.segments.forms`) that is not dense is of use to the reader."""


class FoundChain(NamedTuple):
    """Known segments that hold a sequence's leading blocks, and where each one's part ends: first the stored ones."""

    path: list[Node]
    ends: list[int]
    copies: list[Copy]
    """Of the stored ones, those that are read fastest."""

    @property
    def stored_to(self) -> int:
        """How many leading blocks are stored."""
        return self.ends[len(self.copies) - 1] if self.copies else 0


class ChainSearch:
    """See the module's docstring."""

    def __init__(self, catalog: Catalog, blocks_per_segment: int) -> None:
        self._catalog = catalog
        self._blocks_per_segment = blocks_per_segment

    def find(self, hashes: Sequence[BlockHash], reader: str = "") -> FoundChain:
        """Return the known segments that hold a sequence's leading blocks, as a plan for node ``reader`` finds them."""
        marks = join_marks(hashes)
        path, ends, copies = self._stored_path(marks, reader)
        known, known_ends, _ = self._catalog.trie.runs.path(
            marks, self._blocks_per_segment, _known, ends[-1] if ends else 0
        )
        return FoundChain(path + known, ends + known_ends, copies)

    def knows(self, name: BlockHash) -> bool:
        """Return whether a segment of this name is known, stored or not. O(1)."""
        return name in self._catalog.trie.nodes

    def stored(self, hashes: Sequence[BlockHash], reader: str, serves: Serves) -> FoundChain:
        """Return the stored segments that hold a sequence's leading blocks, in every form that ``serves`` the reader.

        A dense copy serves every reader.
        """
        return FoundChain(*self._stored_path(join_marks(hashes), reader, serves=serves))

    def known_ends(self, hashes: Sequence[BlockHash]) -> list[SegmentKey]:
        """Return the known segments that hold leading blocks of a prompt and that none of the others follows on."""
        path = self.find(hashes).path
        return [node.key for node, below in zip(path, [*path[1:], None], strict=False)
                if below is None or below.parent is not node]  # fmt: skip

    def known_states(self, hashes: Sequence[BlockHash]) -> dict[int, SegmentKey]:
        """Return the known segments of states at a prompt's boundaries, by block, the last one first.

        Of a model without states: none. O(blocks) hashes.
        """
        names = ((end, state_name(hashes[end - 1])) for end in range(len(hashes), 0, -1))
        return {end: SegmentKey(name) for end, name in names if self.knows(name)}

    def reach(self, hashes: Sequence[BlockHash], tier: Tier | None = None) -> int:
        """Return how many leading blocks of a prompt are stored in a tier, or in any shared one."""
        _, ends, _ = self._stored_path(join_marks(hashes), tier=tier)
        return ends[-1] if ends else 0

    def further_stored(self, hashes: Sequence[BlockHash], others: Sequence[BlockHash]) -> Sequence[BlockHash]:
        """Return those of two names of one prompt under which more of it is stored, and of equals what is nearer.

        The first ones where neither is ahead.
        """
        return others if others and self._stored_reach(others) > self._stored_reach(hashes) else hashes

    def _stored_reach(self, hashes: Sequence[BlockHash]) -> tuple[int, int]:
        """How many leading blocks of a prompt any shared tier has, and a CPU tier."""
        return self.reach(hashes), self.reach(hashes, Tier.CPU)

    def _stored_path(
        self, marks: bytes, reader: str = "", tier: Tier | None = None, serves: Serves | None = None
    ) -> tuple[list[Node], list[int], list[Copy]]:
        """Return the stored segments that hold a prompt's leading blocks, where each one's part ends, and their copies.

        ``marks`` are those of the prompt's blocks. The copies are those that a process on node ``reader`` reads
        fastest; with a ``tier``, only its own count. Copies that are not dense count only where they ``serve``.
        """

        def nearest(node: Node) -> Copy | None:
            only = node.copies
            if only is None:
                return None
            if only.next is None and tier is None:
                # `only.resident`, without the call: this runs once for each segment of a prompt
                if only.state is not CopyState.RESIDENT or only.share.retired:
                    return None
                return only if not only.form or (serves is not None and serves(only.form)) else None
            found = (
                copy
                for copy in node.all_copies()
                if copy.resident
                and tier in (None, copy.store.location.tier)
                and (not copy.form or (serves is not None and serves(copy.form)))
            )
            return min(found, key=distance, default=None)

        def distance(copy: Copy) -> int:
            at, holder = copy.store.location
            return 2 if at is not Tier.CPU else holder != reader

        return self._catalog.trie.runs.path(marks, self._blocks_per_segment, nearest, rank=lambda copy: -distance(copy))


def _known(node: Node) -> Node:
    """All that is known counts."""
    return node
