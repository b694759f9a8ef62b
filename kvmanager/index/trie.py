"""The trie of known segments and the ghosts in it.

The key of a node is a hash of the whole prefix, so finding it needs no walk from the root: the trie is one dict, and
an index of what begins with which block (`kvmanager.index.run_index`). The links serve only to go up to the ancestors
and down to the children: for the rare case that a subtree must go, and to show people the hottest of it
(`kvmanager.views`). So siblings stand in the order of their last use, the latest first; the roots of a tenant too.

Invariants: the parent of each node is in the trie, holds the block before the node's first (a node may leave its parent
inside it), and has the same tenant; no node crosses a multiple of ``blocks_per_segment``; at most `MOST_TWINS` nodes
begin with one block; a node is a ghost exactly if it has no copy; a ghost is in the heap exactly if it has no child and
no pin. `forget_coldest_ghosts` leaves at most ``max_ghosts`` ghosts, not counting pinned ones and
those above a copy whose eviction waits for a lease; after the loss of a whole location it takes several calls, for each
one holds up requests. Every operation is O(1), O(log ghosts) or O(`MOST_TWINS`).
"""

import sys
from collections.abc import Callable
from itertools import islice
from typing import Protocol

from kvmanager.index.nodes import Node
from kvmanager.index.run_index import RunIndex
from kvmanager.index.score_heap import ScoreHeap
from kvmanager.segments.keys import BlockHash, SegmentKey
from kvmanager.segments.spans import MARK_BYTES, SegmentSpan

MOST_FORGOTTEN = 1024
"""Ghosts that one call forgets at most, in a few milliseconds; more wait for the next call."""
MOST_TWINS = 32
"""Nodes that begin with one block: each is looked at by every prompt that has it. Each location may have one of its own
for a common beginning that is shorter than a segment."""


class Cursor(Protocol):
    """Goes through the children of a node, a few at a time."""

    next_child: Node | None


class PrefixTrie:
    """All known segments, by key. One thread."""

    def __init__(self, max_ghosts: int, forgotten: Callable[[Node], None] | None = None) -> None:
        """``forgotten`` is told of each node that leaves the trie."""
        self.nodes: dict[SegmentKey | BlockHash, Node] = {}
        self.runs: RunIndex[Node] = RunIndex()
        self.roots: dict[str, Node] = {}
        """By tenant, the first of its nodes without a parent."""
        self.num_roots: dict[str, int] = {}
        self.twins_refused = 0
        """Nodes that were not made, because too many begin with their first block."""
        self.num_ghosts = 0
        self._max_ghosts = max_ghosts
        self._forgotten = forgotten
        self._leaf_ghosts: ScoreHeap[Node] = ScoreHeap()
        self.cursors: dict[Node, list[Cursor]] = {}
        """By node, the cursors that stopped there; a node that leaves sends them to the next.

        `stop` and `go_on` alone change it, a cursor at a time: several are on their way at once.
        """

    def insert(self, span: SegmentSpan, score: float) -> Node | None:
        """Add a segment as a ghost; None when its parent is not known, for nothing can reach it then.

        Nor one with too many twins, unless one of them can be forgotten: the coldest ghost without children and pins.
        """
        parent = self._parent(span)
        if (parent is None and span.parent is not None) or not self._has_room_for_twin(span):
            return None
        node = Node(span, score)
        node.tenant = sys.intern(span.tenant) if parent is None else parent.tenant
        self.nodes[node.key] = node
        self.runs.add(node)
        self._link(node, parent)
        self.became_ghost(node)
        return node

    def reshape(self, node: Node, span: SegmentSpan) -> bool:
        """Let a ghost take the place that ``span`` gives its key; False, and nothing changes, when that is no place.

        One key can be cut in two ways: a sequence whose prompt ended inside a segment and one whose prompt went on have
        segments that end alike, but start elsewhere. And what it follows on can be held by two segments. It is no place
        when the new parent is not known, when a child would begin before it, or among too many twins.
        """
        parent = self._parent(span)
        if parent is None and span.parent is not None:
            return False
        if span.start_block != node.start_block:
            children = list(islice(node.children(), MOST_TWINS + 1))
            grows = span.start_block < node.start_block
            if not grows and (
                len(children) > MOST_TWINS or any(child.start_block <= span.start_block for child in children)
            ):
                return False
            if not self._has_room_for_twin(span):
                return False
            self.runs.remove(node)
            node.start_block, node.num_blocks, node.kind = span.start_block, span.num_blocks, span.kind
            node.marks = span.marks
            self.runs.add(node)
        self._unlink(node)
        self._link(node, parent)
        return True

    def became_ghost(self, node: Node) -> None:
        """Note that ``node`` has no copy (any more)."""
        self.num_ghosts += 1
        self._may_forget(node)

    def no_longer_ghost(self, node: Node) -> None:
        """Note that ``node`` is about to get its first copy."""
        self.num_ghosts -= 1
        self._leaf_ghosts.discard(node)

    def ghost_used(self, node: Node) -> None:
        """Note that the score of the ghost ``node`` has grown."""
        self._leaf_ghosts.update(node, node.score)

    def bring_forward(self, node: Node) -> None:
        """Note a use of ``node``: it moves before its siblings, unless a cursor is on its way through siblings."""
        if self.cursors or node.previous_sibling is None:
            return
        parent = node.parent
        first = self.roots[node.tenant] if parent is None else parent.first_child
        node.previous_sibling.next_sibling = node.next_sibling
        if node.next_sibling is not None:
            node.next_sibling.previous_sibling = node.previous_sibling
        node.previous_sibling, node.next_sibling = None, first
        if first is not None:
            first.previous_sibling = node
        self._set_first(node.tenant, parent, node)

    def stop(self, cursor: Cursor) -> None:
        """Let a cursor stand where it is until `go_on`: siblings keep their order, and none of them is skipped."""
        if cursor.next_child is not None:
            self.cursors.setdefault(cursor.next_child, []).append(cursor)

    def go_on(self, cursor: Cursor) -> None:
        """End a `stop`, at whatever node the cursor stands by now; others stay where they are."""
        node = cursor.next_child
        if node is not None:
            self.cursors[node].remove(cursor)
            if not self.cursors[node]:
                del self.cursors[node]

    def forget_coldest_ghosts(self) -> None:
        """Forget ghosts, coldest leaf first, until no more than ``max_ghosts`` are left, `MOST_FORGOTTEN` in a call."""
        for _ in range(min(self.num_ghosts - self._max_ghosts, MOST_FORGOTTEN)):
            node = self._leaf_ghosts.lowest()
            if node is None:
                return
            self._forget(node)

    def pin(self, node: Node) -> None:
        """Count one more pinned chain through ``node``: it is not forgotten."""
        node.pins += 1
        self._leaf_ghosts.discard(node)

    def unpin(self, node: Node) -> None:
        """Count one pinned chain less."""
        node.pins -= 1
        if node.copies is None:
            self._may_forget(node)

    def _forget(self, ghost: Node) -> None:
        self.no_longer_ghost(ghost)
        del self.nodes[ghost.key]
        self.runs.remove(ghost)
        self._unlink(ghost)
        if self._forgotten is not None:
            self._forgotten(ghost)

    def _has_room_for_twin(self, span: SegmentSpan) -> bool:
        """Return whether another node may begin with a segment's first block; the coldest that may go goes for it."""
        twins = list(self.runs.twins(span.marks[:MARK_BYTES]))
        if len(twins) < MOST_TWINS:
            return True
        free = [twin for twin in twins if twin.copies is None and twin.first_child is None and not twin.pins]
        if not free:
            self.twins_refused += 1
            return False
        self._forget(min(free, key=lambda twin: twin.score))
        return True

    def _may_forget(self, ghost: Node) -> None:
        if ghost.first_child is None and not ghost.pins:
            self._leaf_ghosts.push(ghost, ghost.score)

    def _parent(self, span: SegmentSpan) -> Node | None:
        if span.parent is None:
            return None
        parent = self.nodes.get(span.parent)
        if parent is None or not parent.start_block < span.start_block <= parent.end_block:
            return None  # it may be known in another cut, which does not hold the block before
        return parent

    def _link(self, node: Node, parent: Node | None) -> None:
        node.parent = parent
        if parent is None:
            first = self.roots.get(node.tenant)
            self.num_roots[node.tenant] = self.num_roots.get(node.tenant, 0) + 1
        else:
            self._leaf_ghosts.discard(parent)
            first = parent.first_child
            parent.num_children += 1
        node.next_sibling = first
        if first is not None:
            first.previous_sibling = node
        self._set_first(node.tenant, parent, node)

    def _unlink(self, node: Node) -> None:
        parent, before, after = node.parent, node.previous_sibling, node.next_sibling
        if self.cursors and (stopped := self.cursors.pop(node, None)):
            for cursor in stopped:
                cursor.next_child = after
            if after is not None:
                self.cursors.setdefault(after, []).extend(stopped)
        if before is None:
            self._set_first(node.tenant, parent, after)
        else:
            before.next_sibling = after
        if after is not None:
            after.previous_sibling = before
        node.parent = node.previous_sibling = node.next_sibling = None
        if parent is None:
            self.num_roots[node.tenant] -= 1
            if not self.num_roots[node.tenant]:
                del self.num_roots[node.tenant]
            return
        parent.num_children -= 1
        if parent.copies is None:
            self._may_forget(parent)

    def _set_first(self, tenant: str, parent: Node | None, first: Node | None) -> None:
        """Let ``first`` be the first child of ``parent``, or the first root of a tenant; None: there is none left."""
        if parent is not None:
            parent.first_child = first
        elif first is not None:
            self.roots[tenant] = first
        else:
            del self.roots[tenant]
