"""The tree behind ``text-prefix``: which replica was sent which beginning, written after ray 2.60.0's behaviour.

Source of the rules: `ray/llm/_internal/serve/routing_policies/prefix_aware` (`PrefixCacheAffinityRouter`,
`PrefixTree`). While queues are balanced: the replicas that were sent the longest known beginning of the text, if that
is 10 % of it or more, else the replicas that were sent the least new text; of several, the one with the shortest queue.
Eviction from the tree is off by default there, and left out here. A block stands for its text.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class TextPrefixTree:
    """Per block, the replicas it was sent to. A trace block names all before it, so a flat table is the tree."""

    def __init__(self, names: Iterable[str]) -> None:
        self._sent_to: dict[int, dict[str, None]] = {}
        self._size = dict.fromkeys(names, 0)

    def match(self, hash_ids: Sequence[int]) -> tuple[int, list[str]]:
        """Return how many leading blocks were sent anywhere, and where the last of them was."""
        matched, names = 0, list(self._size)
        for block in hash_ids:
            if block not in self._sent_to:
                break
            matched, names = matched + 1, list(self._sent_to[block])
        return matched, names

    def smallest(self) -> list[str]:
        """Return the replicas that were sent the fewest different blocks."""
        least = min(self._size.values())
        return [name for name, size in self._size.items() if size == least]

    def insert(self, hash_ids: Sequence[int], name: str) -> None:
        """Note that a prompt was sent to ``name``."""
        for block in hash_ids:
            sent_to = self._sent_to.setdefault(block, {})
            self._size[name] += name not in sent_to
            sent_to[name] = None
