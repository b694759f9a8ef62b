"""The entries of the index: a node per known segment, a copy per place where its bytes are.

Life of a copy, at one location:

=========  =====================================================  ==================  ================
state      means                                                  counts in budget    visible to plans
=========  =====================================================  ==================  ================
RESERVED   a replica or tier may store the bytes                  yes                 no
HELD       the tier owns the bytes, but not yet those of the      yes                 no
           parent: a chain is published from its head on
RESIDENT   the tier owns the bytes and the whole chain before     yes                 yes
DOOMED     to be evicted when the last lease on it, and all       yes                 no
           that counts on it, is gone
GONE       forgotten; only a lease may still point to it          no                  no
=========  =====================================================  ==================  ================

RESERVED -> HELD -> RESIDENT -> DOOMED -> GONE; each state may lead straight to DOOMED or GONE, RESERVED straight to
RESIDENT. A copy in a *retired* share (`kvmanager.index.stores`) is on its way out, and in no plan, whatever its state.

A million nodes are the size to plan for: slots, intrusive links, no container per node.
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import Enum
from typing import TYPE_CHECKING

from kvmanager.index.run_index import Run
from kvmanager.index.score_heap import OUTSIDE
from kvmanager.segments.spans import SegmentSpan

if TYPE_CHECKING:
    from kvmanager.index.stores import Partition, Share, Store


_NEVER = float("-inf")  # one for all copies: a million of their own would take 24 MB


class CopyState(Enum):
    """See the table above."""

    RESERVED = "reserved"
    HELD = "held"
    RESIDENT = "resident"
    DOOMED = "doomed"
    GONE = "gone"


class Node(Run):
    """One known segment: its place in the trie, its hotness, its copies. A node without a copy is a *ghost*."""

    __slots__ = (
        "branches",
        "cohort",
        "copies",
        "first_child",
        "key",
        "kind",
        "nbytes",
        "next_sibling",
        "num_blocks",
        "num_children",
        "parent",
        "pins",
        "position",
        "previous_sibling",
        "score",
        "start_block",
        "tenant",
        "uses",
    )

    def __init__(self, span: SegmentSpan, score: float) -> None:
        super().__init__(span.marks)
        self.key = span.key
        self.start_block = span.start_block
        self.num_blocks = span.num_blocks
        self.kind = span.kind
        self.tenant = span.tenant
        """Tag of the tenant (`kvmanager.segments.keys.tenant_tag`); the parent's, where there is one."""
        self.nbytes = 0
        """Size of the segment stored raw, header included, as it was offered last (before it was pinned)."""
        self.pins = 0
        """Pinned chains that this node is part of (`kvmanager.eviction.pins`)."""
        self.score = score
        """Hotness; see `kvmanager.index.hotness`."""
        self.parent: Node | None = None
        self.first_child: Node | None = None
        self.next_sibling: Node | None = None
        """The roots of a tenant are siblings too."""
        self.previous_sibling: Node | None = None
        self.num_children = 0
        self.copies: Copy | None = None
        """First of a linked list: a node has few copies, nearly always one."""
        self.position = OUTSIDE
        """In the heap of ghosts."""
        self.cohort: object | None = None
        """This and the rest is the reuse model's (`kvmanager.eviction.reuse_model`)."""
        self.uses = 1
        self.branches = 0
        """Children it has had."""

    @property
    def end_block(self) -> int:
        """First block after the segment."""
        return self.start_block + self.num_blocks

    @property
    def span(self) -> SegmentSpan:
        """The segment's name and place."""
        parent = None if self.parent is None else self.parent.key
        return SegmentSpan(self.key, parent, self.start_block, self.num_blocks, self.kind, self.marks, self.tenant)

    def all_copies(self) -> Iterator[Copy]:
        """Yield the copies, in any state but GONE."""
        copy = self.copies
        while copy is not None:
            yield copy
            copy = copy.next

    def copy_at(self, store: Store) -> Copy | None:
        """Return the copy at one location, in any state but GONE."""
        copy = self.copies
        while copy is not None and copy.partition.store is not store:
            copy = copy.next
        return copy

    def children(self) -> Iterator[Node]:
        """Yield the nodes that continue this one, ghosts too. O(children): never for a request."""
        child = self.first_child
        while child is not None:
            yield child
            child = child.next_sibling


class Copy:
    """A segment's bytes at one location, or the right to put them there."""

    __slots__ = (
        "children",
        "earlier",
        "form",
        "later",
        "leases",
        "nbytes",
        "next",
        "node",
        "partition",
        "position",
        "renewed",
        "share",
        "shelf",
        "state",
    )

    def __init__(self, node: Node, store: Store, nbytes: int) -> None:
        self.node = node
        self.partition: Partition = store.partition_of(node.tenant)
        """The part of the location's budget that it counts in."""
        self.share: Share = store.share_of(node.tenant)
        """What its tenant has at the location."""
        self.nbytes = nbytes
        """What it takes here; Redis' copies may be coded, and smaller than the node's raw size."""
        self.form = b""
        """Empty: dense. A copy in another form (`kvmanager.segments.forms`) is left out of plans for dense KV."""
        self.state = CopyState.RESERVED
        self.children = 0
        """Copies of child nodes at this location that count on this one: RESERVED, HELD or RESIDENT."""
        self.leases = 0
        self.renewed = _NEVER
        """At Redis: when it was last kept from expiring (`kvmanager.moves.renewals`), to this manager's knowledge."""
        self.next: Copy | None = None
        """Of the same node, at another location."""
        self.earlier: Copy | None = None
        self.later: Copy | None = None
        """Neighbours in the list of its share."""
        self.position = OUTSIDE
        """In the heap of the eviction policy, or wherever that keeps it."""
        self.shelf: object | None = None
        """The eviction policy's: where ``position`` counts."""

    @property
    def store(self) -> Store:
        """The books of its location."""
        return self.partition.store

    @property
    def evictable(self) -> bool:
        """Whether it may go now: a leaf of what its location holds, without a lease or a pin.

        One that was cleared, and has not gone yet, may too.
        """
        return self.state is CopyState.RESIDENT and self.children == 0 and self.leases == 0 and self.node.pins == 0

    @property
    def resident(self) -> bool:
        """Whether a plan may contain it."""
        return self.state is CopyState.RESIDENT and not self.share.retired

    @property
    def upholds(self) -> bool:
        """Whether a child may count on it: it has bytes, or a promise of them, and is not on its way out."""
        return not self.share.retired and self.state in (CopyState.RESIDENT, CopyState.HELD, CopyState.RESERVED)
