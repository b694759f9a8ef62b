"""Chunks of a prompt: runs of its tokens that a separator begins, or that are a text which the request names.

Invariants of what separators begin: chunks are in order and do not overlap; each begins with its separator, and holds
no other separator and no other boundary; none begins at token 0, for there it is the prompt's own prefix; there are at
most `most`, and what follows them is ordinary prompt. The same run of tokens is the same chunk in every prompt.

Pure functions of time linear in the prompt: any thread.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterator, Sequence
from typing import NamedTuple

_TYPE = "I"
_TOKEN_BYTES = array(_TYPE).itemsize
_LONGEST_LEAD = 64  # tokens that pick a text: documents may begin alike, hardly for this length
_MOST_COMPARED = 1024  # tokens that are compared, for each token of the prompt


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


class Found(NamedTuple):
    """What became of texts in a prompt."""

    chunks: list[Span]
    """In order, without overlap: at each place the longest text that is there."""
    absent: int
    """Texts that were not found, those among them that are too short."""


class GivenTexts:
    """The texts of one request, found in its prompt by their token ids. Immutable.

    A text between others may be cut into other tokens at its two ends than alone. So its first and last tokens are left
    out, and the rest is looked for, token by token. The chunk is these tokens: the same in every prompt.

    A few leading tokens pick the texts that may begin at a place, and only those are compared. The comparisons are
    bounded: a prompt and texts that almost match each other everywhere reach the bound, and no more chunks are found
    then. Time is linear in the texts, and for each prompt in the prompt.
    """

    def __init__(self, texts: Sequence[Sequence[int]], min_tokens: int) -> None:
        """`texts`: of each the token ids that it has alone. No chunk is shorter than `min_tokens`, at least 1."""
        self._inner = [_packed(own_tokens(text)) for text in texts]
        self._lead_bytes = min(min_tokens, _LONGEST_LEAD) * _TOKEN_BYTES
        self._by_lead: dict[bytes, list[bytes]] = {}
        long = {inner for inner in self._inner if len(inner) >= min_tokens * _TOKEN_BYTES}
        for inner in sorted(long, key=len, reverse=True):
            self._by_lead.setdefault(inner[: self._lead_bytes], []).append(inner)

    def find(self, token_ids: Sequence[int], most: int) -> Found:
        """Their occurrences in a prompt, at most `most` and none at token 0."""
        found: list[Span] = []
        seen: set[bytes] = set()
        prompt = _packed(token_ids)
        may_compare = _MOST_COMPARED * len(prompt)
        place, last = _TOKEN_BYTES, len(prompt) - self._lead_bytes  # from token to token: nothing is found in between
        while self._by_lead and place <= last and may_compare > 0 and len(found) < most:
            match = b""
            for inner in self._by_lead.get(prompt[place : place + self._lead_bytes], ()):
                may_compare -= len(inner)
                if prompt.startswith(inner, place):
                    match = inner
                    break
            if match:
                seen.add(match)
                found.append(Span(place // _TOKEN_BYTES, len(match) // _TOKEN_BYTES))
            place += len(match) or _TOKEN_BYTES
        return Found(found, sum(inner not in seen for inner in self._inner))


def own_tokens(token_ids: Sequence[int]) -> Sequence[int]:
    """Of a text's tokens those that it has in every prompt: all but the first and the last."""
    return token_ids[1:-1]


def _packed(token_ids: Sequence[int]) -> bytes:
    return array(_TYPE, token_ids).tobytes()


def chunks_of_text(token_ids: Sequence[int], separators: Separators, min_tokens: int) -> list[list[int]]:
    """The chunks of a text with these tokens, of at least `min_tokens`; none: all are shorter."""
    begun = separators.begun(token_ids)
    chunks = [token_ids[span.start : span.end] for span in begun] if begun else [own_tokens(token_ids)]
    return [list(chunk) for chunk in chunks if len(chunk) >= min_tokens]
