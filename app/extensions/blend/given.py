"""Chunks that a request names by their texts: found in its prompt by their token ids.

A text between others may be cut into other tokens at its two ends than alone. So its first and last tokens are left
out, and the rest is looked for, token by token. The chunk is these tokens: the same in every prompt.

A few leading tokens pick the texts that may begin at a place, and only those are compared. The comparisons are bounded:
a prompt and texts that almost match each other everywhere reach the bound, and no more chunks are found then.

Pure: any thread. Time is linear in the texts, and for each prompt in the prompt.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple

from app.extensions.blend.recognition import Separators, Span

_TYPE = "I"
_TOKEN_BYTES = array(_TYPE).itemsize
_LONGEST_LEAD = 64  # tokens that pick a text: documents may begin alike, hardly for this length
_MOST_COMPARED = 1024  # tokens that are compared, for each token of the prompt


class Found(NamedTuple):
    """What became of texts in a prompt."""

    chunks: list[Span]
    """In order, without overlap: at each place the longest text that is there."""
    absent: int
    """Texts that were not found, those among them that are too short."""


class GivenTexts:
    """The texts of one request. Immutable."""

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
