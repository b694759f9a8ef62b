"""A trie of more than 100,000 nodes behind the ingress: the manager's own calls over it, without its actor."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from fake_backend import FakeControl

from deployments.manager.reports import Reports
from kvmanager.index.deltas import DeltaLog
from kvmanager.index.device_index import DeviceIndex
from kvmanager.index.hotness import HotnessClock
from kvmanager.index.nodes import Node
from kvmanager.index.trie import PrefixTrie
from kvmanager.segments.keys import BlockHash, SegmentKey
from kvmanager.segments.spans import MARK_BYTES, NodeKind, SegmentSpan
from kvmanager.views.tree import Tree, Views

DOCUMENTS, CHATS, ROUNDS = 60, 50, 12
QUESTIONS = 40_000
"""That follow on one document."""
LONG_CHAT = 2_000


class NotingViews(Views):
    """Notes how many nodes each look at the tree has touched."""

    looked_at: list[int]

    def tree(self, tenant: str | None, root: bytes | None, depth: int, most: int) -> Tree | None:
        tree = super().tree(tenant, root, depth, most)
        if tree is not None:
            self.looked_at.append(tree.looked_at)
        return tree


def large_trie() -> PrefixTrie:
    """Documents with chats about them, one with very many questions, prompts of their own, and one very long chat."""
    trie, rng = PrefixTrie(10**9), random.Random(0)

    def add(parent: Node | None = None, score: float = 0.0, kind: NodeKind = NodeKind.REQUEST) -> Node:
        key = SegmentKey(rng.randbytes(32))
        start = 0 if parent is None else parent.end_block
        above = None if parent is None else parent.key
        node = trie.insert(SegmentSpan(key, above, start, 1, kind, key[:MARK_BYTES]), score)
        assert node is not None
        return node

    def chain(parent: Node, length: int, score: float) -> None:
        for number in range(length):
            parent = add(parent, score, NodeKind.ANSWER if number % 2 else NodeKind.REQUEST)

    for _ in range(QUESTIONS):  # the latest used come first: these are the oldest
        add(score=rng.random())
    for _ in range(DOCUMENTS):
        document = add(score=5.0 * rng.random())
        for _ in range(CHATS):
            chain(document, ROUNDS, document.score * rng.random())
    popular = add(score=9.0)
    for _ in range(QUESTIONS):
        add(popular, 4.0 * rng.random())
    chain(add(score=8.0), LONG_CHAT, 8.0)
    return trie


@dataclass
class LargeTrieControl(FakeControl):
    """Answers `trie` as the manager does, over a trie of its own; two replicas, whose devices have some of it."""

    trie_behind: PrefixTrie = field(default_factory=large_trie)

    def __post_init__(self) -> None:
        devices = DeviceIndex(DeltaLog(10))
        some = random.Random(1).sample(sorted(self.trie_behind.nodes), 4_000)
        for rank in range(2):
            devices.stored(f"replica-{rank}", map(BlockHash, some[rank::2]))
        self.views = NotingViews(self.trie_behind, devices, HotnessClock(1000.0), 32)
        self.views.looked_at = []
        self.answered: list[int] = []
        """Nodes of each answer."""
        replicas = {f"replica-{rank}": SimpleNamespace(rank=rank, last_seen=0.0) for rank in range(2)}
        self._reports = Reports(SimpleNamespace(views=self.views), replicas, *(Any,) * 6)  # type: ignore[arg-type]

    async def trie(self, tenant: str | None, root: bytes | None, depth: int, most: int) -> dict[str, Any] | None:
        found = await self._reports.trie(tenant, root, depth, most)
        if found is not None:
            self.answered.append(len(found["nodes"]))
        return found
