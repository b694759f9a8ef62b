"""Chunks that a separator begins: runs of a prompt's tokens that mean the same wherever they stand.

Invariants of what is found: chunks are in order and do not overlap; each begins with its separator, and holds no other
separator and no other boundary; none begins at token 0, for there it is the prompt's own prefix; there are at most
`most`, and what follows them is ordinary prompt. The same run of tokens is the same chunk in every prompt.

Pure functions of time linear in the prompt: any thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple


class Span(NamedTuple):
    """A run of a prompt's tokens: `tokens` of them, from token `start` on."""

    start: int
    tokens: int

    @property
    def end(self) -> int:
        """The token behind the last one."""
        return self.start + self.tokens


class Separators:
    """The token sequences that begin chunks, and the boundaries that end them, as the next separator does."""

    def __init__(self, sequences: Collection[Sequence[int]], boundaries: Collection[int]) -> None:
        """`sequences` of token ids, none empty; `boundaries` are single token ids, such as the special tokens."""
        self.sequences = sorted({tuple(one) for one in sequences}, key=lambda one: (-len(one), one))
        self._by_first: dict[int, list[tuple[int, ...]]] = {}
        for sequence in self.sequences:  # the longest first: of two that match, it is meant
            self._by_first.setdefault(sequence[0], []).append(sequence)
        self.boundaries = frozenset(boundaries)
        self._stops = self.boundaries | self._by_first.keys()

    def chunks(self, token_ids: Sequence[int], min_tokens: int, most: int) -> list[Span]:
        """The chunks of a prompt that are at least `min_tokens` long, in order."""
        found: list[Span] = []
        for span in self._all(token_ids):
            if span.start and span.tokens >= min_tokens:
                if len(found) == most:
                    break
                found.append(span)
        return found

    def begun(self, token_ids: Sequence[int]) -> list[Span]:
        """All that separators begin, however short, and at token 0 too: of what is no prompt."""
        return list(self._all(token_ids))

    def _all(self, token_ids: Sequence[int]) -> Iterator[Span]:
        stops, begun, inside = self._stops, -1, 0
        for place in [place for place, token in enumerate(token_ids) if token in stops]:
            if place < inside:
                continue  # a part of the separator that has just begun a chunk
            separator = self._at(token_ids, place)
            if not separator and token_ids[place] not in self.boundaries:
                continue  # it only looks like a separator's beginning
            if begun >= 0:
                yield Span(begun, place - begun)
            begun = place if separator else -1
            inside = place + separator
        if begun >= 0:
            yield Span(begun, len(token_ids) - begun)

    def _at(self, token_ids: Sequence[int], place: int) -> int:
        """The length of the separator that stands there; 0: none does."""
        for sequence in self._by_first.get(token_ids[place], ()):
            if tuple(token_ids[place : place + len(sequence)]) == sequence:
                return len(sequence)
        return 0
