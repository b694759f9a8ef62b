"""The trie of known segments and the ghosts in it.

The key of a node is a hash of the whole prefix, so finding it needs no walk from the root: the trie is one dict, and
the links serve only to go up to the ancestors and, for the rare case that a subtree must go, down to the children.

Invariants: the parent of each node is in the trie, ends where the node starts, and has the same tenant; no node crosses
a multiple of ``blocks_per_segment``; a node is a ghost exactly if it has no copy; a ghost is in the heap exactly if it
has no child and no pin. `forget_coldest_ghosts` leaves at most ``max_ghosts`` ghosts, not counting pinned ones and
those above a copy whose eviction waits for a lease; after the loss of a whole location it takes several calls, for each
one holds up requests. Every operation is O(1) or O(log ghosts).
"""

import sys
from collections.abc import Callable
from typing import Protocol

from kvmanager.index.nodes import Node
from kvmanager.index.score_heap import ScoreHeap
from kvmanager.segments.keys import BlockHash, SegmentKey
from kvmanager.segments.spans import SegmentSpan

MOST_FORGOTTEN = 1024
"""Ghosts that one call forgets at most, in a few milliseconds; more wait for the next call."""


class Cursor(Protocol):
    """Goes through the children of a node, a few at a time."""

    next_child: Node | None


class PrefixTrie:
    """All known segments, by key. One thread."""

    def __init__(self, max_ghosts: int, forgotten: Callable[[Node], None] | None = None) -> None:
        """``forgotten`` is told of each node that leaves the trie."""
        self.nodes: dict[SegmentKey | BlockHash, Node] = {}
        self.num_ghosts = 0
        self._max_ghosts = max_ghosts
        self._forgotten = forgotten
        self._leaf_ghosts: ScoreHeap[Node] = ScoreHeap()
        self.cursors: dict[Node, list[Cursor]] = {}
        """Who stopped at which node on its way through siblings; one that leaves sends them to the next."""

    def insert(self, span: SegmentSpan, score: float) -> Node | None:
        """Add a segment as a ghost; None when its parent is not known, for nothing can reach it then."""
        parent = self._parent(span)
        if parent is None and span.parent is not None:
            return None
        node = Node(span, score)
        node.tenant = sys.intern(span.tenant) if parent is None else parent.tenant
        self.nodes[node.key] = node
        self._link(node, parent)
        self.became_ghost(node)
        return node

    def reshape(self, node: Node, span: SegmentSpan) -> bool:
        """Let a ghost take the place that ``span`` gives its key; False when the new parent is not known.

        One key can be cut in two ways: a sequence whose prompt ended inside a segment and one whose prompt went on have
        segments that end alike, but start elsewhere.
        """
        parent = self._parent(span)
        if parent is None and span.parent is not None:
            return False
        self._unlink(node)
        node.start_block, node.num_blocks, node.kind = span.start_block, span.num_blocks, span.kind
        node.marks = span.marks
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

    def forget_coldest_ghosts(self) -> None:
        """Forget ghosts, coldest leaf first, until no more than ``max_ghosts`` are left, `MOST_FORGOTTEN` in a call."""
        for _ in range(min(self.num_ghosts - self._max_ghosts, MOST_FORGOTTEN)):
            node = self._leaf_ghosts.lowest()
            if node is None:
                return
            self.no_longer_ghost(node)
            del self.nodes[node.key]
            self._unlink(node)
            if self._forgotten is not None:
                self._forgotten(node)

    def pin(self, node: Node) -> None:
        """Count one more pinned chain through ``node``: it is not forgotten."""
        node.pins += 1
        self._leaf_ghosts.discard(node)

    def unpin(self, node: Node) -> None:
        """Count one pinned chain less."""
        node.pins -= 1
        if node.copies is None:
            self._may_forget(node)

    def _may_forget(self, ghost: Node) -> None:
        if ghost.first_child is None and not ghost.pins:
            self._leaf_ghosts.push(ghost, ghost.score)

    def _parent(self, span: SegmentSpan) -> Node | None:
        if span.parent is None:
            return None
        parent = self.nodes.get(span.parent)
        if parent is not None and parent.end_block != span.start_block:
            raise ValueError(f"{span} does not start where its parent ends (block {parent.end_block})")
        return parent

    def _link(self, node: Node, parent: Node | None) -> None:
        node.parent = parent
        if parent is None:
            return
        self._leaf_ghosts.discard(parent)
        node.next_sibling = parent.first_child
        if parent.first_child is not None:
            parent.first_child.previous_sibling = node
        parent.first_child = node

    def _unlink(self, node: Node) -> None:
        parent, before, after = node.parent, node.previous_sibling, node.next_sibling
        if parent is None:
            return
        if self.cursors and (stopped := self.cursors.pop(node, None)):
            for cursor in stopped:
                cursor.next_child = after
            if after is not None:
                self.cursors.setdefault(after, []).extend(stopped)
        if before is None:
            parent.first_child = after
        else:
            before.next_sibling = after
        if after is not None:
            after.previous_sibling = before
        node.parent = node.previous_sibling = node.next_sibling = None
        if parent.copies is None:
            self._may_forget(parent)
