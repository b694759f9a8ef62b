"""The hottest part of the trie, for people: a bounded number of nodes, and how much lies below each.

The search is best first: of the nodes whose parent is shown the hottest is shown next, so a subtree is as deep in the
picture as it is hot. Siblings stand in the order of their last use (`kvmanager.index.trie`), and of those no more than
`MOST_SIBLINGS` are looked at: the latest used.

Bounds, whatever the index holds: one call looks at `MOST_LOOKED_AT` nodes, shows `MOST_NODES`, and walks through
`MOST_COUNTED` more to say what lies below, plus `LEAST_COUNTED` for each node shown. What was not walked through makes
a count a lower bound, and the node says so. O(log n) per node looked at. One thread.

A model's states are no nodes here, but landings of the segment that they follow on. Of a node whose children are too
deep they are looked for among the latest used of these, as far as the bound allows; others count as hidden children.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, islice
from typing import Any

from kvmanager.index.device_index import DeviceIndex
from kvmanager.index.hotness import HotnessClock
from kvmanager.index.locations import Tier
from kvmanager.index.nodes import Node
from kvmanager.index.trie import PrefixTrie
from kvmanager.segments.keys import BlockHash, SegmentKey
from kvmanager.segments.spans import NodeKind
from kvmanager.views.chains import Chain

MOST_NODES = 2_000
MOST_DEPTH = 16
MOST_SIBLINGS = 1_024
MOST_LOOKED_AT = 4_096
MOST_COUNTED = 8_192
LEAST_COUNTED = 4
_SHARED = (Tier.CPU, Tier.REDIS)


@dataclass(slots=True)
class Shown:
    """A node that is shown. The counts of segments and blocks below it are lower bounds unless ``complete``."""

    node: Node
    level: int
    shown_children: int = 0
    segments_below: int = 0
    blocks_below: int = 0
    complete: bool = True
    states: list[Node] = field(default_factory=list)
    """The model's states that follow on it, stored or not."""

    @property
    def children(self) -> int:
        """Segments that follow on it."""
        return self.node.num_children - len(self.states)

    @property
    def hidden(self) -> int:
        """Children that are not shown, each with all that follows on it."""
        return self.children - self.shown_children


@dataclass(frozen=True, slots=True)
class Tree:
    """What is shown, parents before children and else the hottest first."""

    shown: Sequence[Shown]
    hidden_roots: int
    """Of all roots that were asked for; 0 where a node's subtree was."""
    looked_at: int
    """Nodes that the search and the counting have touched."""


class Views:
    """See the module's docstring."""

    def __init__(self, trie: PrefixTrie, devices: DeviceIndex, clock: HotnessClock, block_tokens: int) -> None:
        self._trie = trie
        self._devices = devices
        self._clock = clock
        self._block_tokens = block_tokens

    def tree(self, tenant: str | None, root: bytes | None, depth: int, most: int) -> Tree | None:
        """Return ``most`` nodes up to ``depth`` levels below ``root``, itself included, or the roots and what follows.

        ``tenant``: the tag of the one whose nodes may be seen; None: all. Returns None for a ``root`` that is not
        known, or is another's. ``depth`` and ``most`` are cut to `MOST_DEPTH` and `MOST_NODES`.
        """
        depth, most = max(1, min(depth, MOST_DEPTH)), max(1, min(most, MOST_NODES))
        if root is None:
            candidates, roots, level = self._roots(tenant), self._num_roots(tenant), 1
        else:
            node = self._trie.nodes.get(SegmentKey(root))
            if node is None or node.kind is NodeKind.STATE or tenant not in (None, node.tenant):
                return None
            candidates, roots, level = iter((node,)), 0, 0
        shown, looked_at = _search(candidates, level, depth, most)
        counted = _count_below(shown)
        hidden = roots - sum(one.level == level for one in shown.values()) if root is None else 0
        return Tree(list(shown.values()), hidden, looked_at + counted)

    def describe(
        self, shown: Iterable[Shown], replicas: Mapping[int, str], *, with_tenants: bool
    ) -> list[dict[str, Any]]:
        """Return nodes as the control API shows them. ``replicas``: by number the names of those that are there.

        A device counts where it has the segment's last block. O(nodes x (copies + devices)).
        """
        devices = {rank: self._devices.held(name) for rank, name in sorted(replicas.items())}
        return [self._describe(one, devices, with_tenants) for one in shown]

    def chain(self, path: Sequence[Node]) -> tuple[Chain, Iterator[Sequence[BlockHash]]]:
        """Return a chain of segments, and what devices have for it to hear, a bounded part at a time."""
        chain = Chain(path)
        return chain, chain.on_devices(self._devices)

    def device_blocks(self, replica: str) -> int:
        """Return how many blocks a replica's device holds."""
        return len(self._devices.held(replica))

    def _describe(self, one: Shown, devices: Mapping[int, Collection[BlockHash]], with_tenants: bool) -> dict[str, Any]:
        node, sizes = one.node, _sizes(one.node)
        tiers: dict[str, Any] = {"device": [rank for rank, held in devices.items() if BlockHash(node.key) in held]}
        tiers |= {tier.value: nbytes for tier, nbytes in sizes.items()}
        uses = self._clock.uses(node.score)
        landings = self._landings(one.states)
        return {
            "id": node.key.hex(),
            "parent": None if node.parent is None else node.parent.key.hex(),
            "kind": node.kind.value,
            "start_token": node.start_block * self._block_tokens,
            "tokens": node.num_blocks * self._block_tokens,
            "segments_below": one.segments_below,
            "tokens_below": one.blocks_below * self._block_tokens,
            "below_complete": one.complete,
            "uses": round(uses, 4),
            "hotness": round(uses / (1.0 + uses), 4),
            "bytes": sum(sizes.values()),
            "tiers": tiers,
            "pinned": bool(node.pins),
            "children": one.children,
            "hidden": one.hidden,
            **({"landings": landings} if landings else {}),
            **({"tenant": node.tenant} if with_tenants else {}),
        }

    def _landings(self, states: Iterable[Node]) -> list[dict[str, Any]]:
        """Where states are stored, by their place; what they follow on is in the same tiers."""
        found = [(node.start_block * self._block_tokens, _sizes(node)) for node in states]
        return [
            {"end_token": token, "tiers": {tier.value: nbytes for tier, nbytes in sizes.items()}}
            for token, sizes in sorted(found, key=lambda one: one[0])
            if any(sizes.values())
        ]

    def _roots(self, tenant: str | None) -> Iterator[Node]:
        """Yield roots, the latest used of each tenant first; of many tenants as many of each."""
        if tenant is not None:
            return _siblings(self._trie.roots.get(tenant))
        first = list(islice(self._trie.roots.values(), MOST_SIBLINGS))
        each = max(1, MOST_SIBLINGS // max(1, len(first)))
        return chain.from_iterable(islice(_siblings(node), each) for node in first)

    def _num_roots(self, tenant: str | None) -> int:
        """O(tenants) for all of them."""
        return sum(self._trie.num_roots.values()) if tenant is None else self._trie.num_roots.get(tenant, 0)


def _sizes(node: Node) -> dict[Tier, int]:
    """Return the bytes that each shared tier has of a node."""
    sizes = dict.fromkeys(_SHARED, 0)
    for copy in node.all_copies():
        if copy.resident:
            sizes[copy.store.location.tier] += copy.nbytes
    return sizes


def _siblings(node: Node | None) -> Iterator[Node]:
    while node is not None:
        yield node
        node = node.next_sibling


def _search(candidates: Iterator[Node], level: int, depth: int, most: int) -> tuple[dict[Node, Shown], int]:
    """Show the hottest of ``candidates``, which are of ``level``, and then the hottest of their children with them."""
    shown: dict[Node, Shown] = {}
    heap: list[tuple[float, int, Node, int]] = []
    closed: list[Shown] = []
    looked_at = 0
    while True:
        for node in islice(candidates, min(MOST_SIBLINGS, MOST_LOOKED_AT - looked_at)):
            looked_at += 1
            if node.parent is not None and node.kind is NodeKind.STATE:
                shown[node.parent].states.append(node)
            else:
                heapq.heappush(heap, (-node.score, looked_at, node, level))
        if not heap or len(shown) == most:
            return shown, looked_at + _look_for_states(closed, MOST_LOOKED_AT - looked_at)
        _, _, hottest, level = heapq.heappop(heap)
        one = shown[hottest] = Shown(hottest, level)
        above = None if hottest.parent is None else shown.get(hottest.parent)
        if above is not None:
            above.shown_children += 1
        if level == depth:
            closed.append(one)
            candidates = iter(())
        else:
            candidates = hottest.children()
        level += 1


def _look_for_states(closed: Sequence[Shown], most: int) -> int:
    """Note the states that follow on nodes whose children are too deep; return how many nodes were touched."""
    touched = 0
    for one in closed:
        children = list(islice(one.node.children(), min(MOST_SIBLINGS, most // len(closed))))
        one.states += [node for node in children if node.kind is NodeKind.STATE]
        touched += len(children)
    return touched


def _count_below(shown: Mapping[Node, Shown]) -> int:
    """Note for each node what lies below it, within the walk's bound; return how many nodes were touched."""
    partly = sum(one.hidden > 0 for one in shown.values())
    each = LEAST_COUNTED + MOST_COUNTED // max(1, partly)
    touched = 0
    for one in reversed(list(shown.values())):  # children before parents
        if one.hidden:
            touched += _walk(one, shown, each)
        above = None if one.node.parent is None else shown.get(one.node.parent)
        if above is not None:
            above.segments_below += 1 + one.segments_below
            above.blocks_below += one.node.num_blocks + one.blocks_below
            above.complete = above.complete and one.complete
    return touched


def _walk(one: Shown, shown: Mapping[Node, Shown], most: int) -> int:
    """Add to a node what lies below its children that are not shown; return how many nodes were touched."""
    stack = [one.node.first_child]
    touched = 0
    while stack:
        node = stack.pop()
        if node is None:
            continue
        if touched == most:
            one.complete = False
            break
        touched += 1
        stack.append(node.next_sibling)
        if node not in shown and node.kind is not NodeKind.STATE:  # else it tells of itself, or has no tokens
            one.segments_below += 1
            one.blocks_below += node.num_blocks
            stack.append(node.first_child)
    return touched
