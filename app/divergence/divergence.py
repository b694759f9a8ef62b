"""Where two prompts part, where they come together again, and what the piece between looks like.

Tokens are native 32-bit integers, in bytes. What the piece is, a date or an id, is a guess by its text, for which
little of it is decoded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

import numpy as np

from app.metrics.labels import BY_BILLING_LINE, BY_DATE, BY_ID, BY_OTHER, BY_TEMPLATE

ID_BYTES = 4
MOST_APART = 256
"""Tokens that a piece may have which only one of the prompts holds."""
_SKIPPED = (16, 64, MOST_APART)
"""How far behind the divergence the same tokens are looked for, one after another."""

SHOWN_BEFORE, SHOWN_BEHIND, MOST_SHOWN = 64, 16, 96
"""Tokens that are looked at: before the divergence, behind the piece, and of the piece with what is behind it."""
_MOST_CHARACTERS, _AROUND = 64, 256
"""Of a piece, in which a date counts: a long text may well have one. And on either side, which patterns may search."""
_MONTH = "(?:jan|feb|mar|apr|may|jun|jul|aug|sep|oct|nov|dec)[a-z]{0,6}"
_DATES = re.compile(
    rf"""\d{{2,4}}[-/.]\d{{1,2}}[-/.]\d{{1,4}} | \d{{1,2}}:\d{{2}}(?::\d{{2}})? | \b1[5-9]\d{{8}}(?:\d{{3}})?\b
    | \b(?:\d{{1,2}}(?:st|nd|rd|th)?[ ])?{_MONTH}\.?,?[ ]\d{{1,4}}(?:,?[ ]\d{{4}})? | \b\d{{1,2}}\.?[ ]{_MONTH}\b
    | \b(?:mon|tues?|wed(?:nes)?|thu(?:rs)?|fri|sat(?:ur)?|sun)(?:day)?\b""",
    re.VERBOSE | re.IGNORECASE,
)
_BILLING = re.compile(r"billing", re.IGNORECASE)
_NAMES_ID = re.compile(
    r"\b(?:id|uuid|guid|nonce|hash|session|trace|request|conversation|ticket|order)\b[^\n]{0,24}$", re.IGNORECASE
)
_ID = re.compile(r"(?=[\w-]{0,64}\d)[\w-]{8,}")
_WORD = re.compile(r"[\w-]*$"), re.compile(r"[\w-]*")


class Divergence(NamedTuple):
    """`shared` leading tokens are the same; so are those behind `end` in the one and `other_end` in the other."""

    shared: int
    end: int
    other_end: int


def common(first: bytes, second: bytes) -> int:
    """How many leading tokens are the same."""
    least = min(len(first), len(second)) // ID_BYTES
    unlike = np.frombuffer(first, np.int32, least) != np.frombuffer(second, np.int32, least)
    return int(unlike.argmax()) if unlike.any() else least


def divergence(first: bytes, second: bytes, alike: int) -> Divergence | None:
    """Of two prompts that hold the same `alike` tokens behind what differs; None: they do not.

    Each differing piece has `MOST_APART` tokens at most. A few searches, each in some hundred tokens.
    """
    shared = common(first, second)
    if min(len(first), len(second)) <= shared * ID_BYTES:
        return None
    for skipped in _SKIPPED:
        at = shared + skipped
        same = first[at * ID_BYTES : (at + alike) * ID_BYTES]
        if len(same) < alike * ID_BYTES:
            return None
        until = at + MOST_APART + alike
        found = second.find(same, shared * ID_BYTES, until * ID_BYTES)
        if found >= 0 and found % ID_BYTES == 0:
            return _ends(first, second, shared, at, found // ID_BYTES)
    return None


def _ends(first: bytes, second: bytes, shared: int, at: int, other_at: int) -> Divergence:
    """The same tokens begin at `at` and `other_at`, or somewhat before."""
    most = min(at, other_at) - shared
    one = np.frombuffer(first, np.int32, most, (at - most) * ID_BYTES)[::-1]
    other = np.frombuffer(second, np.int32, most, (other_at - most) * ID_BYTES)[::-1]
    unlike = one != other
    back = int(unlike.argmax()) if unlike.any() else most
    return Divergence(shared, at - back, other_at - back)


def cause_of(
    first: Sequence[int],
    second: Sequence[int],
    where: Divergence,
    decode: Callable[[Sequence[int]], str],
    marks: Collection[int],
) -> str:
    """One of `app.metrics.labels.PARTED`. `marks`: tokens that only a template writes, such as those of turns."""
    pieces = first[where.shared : where.end], second[where.shared : where.other_end]
    if any(token in marks for piece in pieces for token in piece):
        return BY_TEMPLATE
    since = max(0, where.shared - SHOWN_BEFORE)
    texts = [
        decode(tokens[since : min(end + SHOWN_BEHIND, where.shared + MOST_SHOWN)])
        for tokens, end in ((first, where.end), (second, where.other_end))
    ]
    at = next((at for at, (one, other) in enumerate(zip(*texts, strict=False)) if one != other), min(map(len, texts)))
    sides = [_Side(text, at) for text, piece in zip(texts, pieces, strict=True) if piece]
    for cause, is_it in ((BY_BILLING_LINE, _Side.is_billing), (BY_DATE, _Side.is_date), (BY_ID, _Side.is_id)):
        if all(is_it(side) for side in sides):
            return cause
    return BY_OTHER


class _Side:
    """One prompt's text around the character `at`, the first that differs."""

    def __init__(self, text: str, at: int) -> None:
        since = max(0, at - _AROUND)
        self.text, self.at = text[since : at + _AROUND], at - since

    def is_billing(self) -> bool:
        start = self.text.rfind("\n", 0, self.at) + 1
        end = self.text.find("\n", self.at)
        return _BILLING.search(self.text, start, end if end > self.at else len(self.text)) is not None

    def is_date(self) -> bool:
        """A date or time has the first character that differs, or begins soon behind it."""
        found = (match for match in _DATES.finditer(self.text) if match.end() > self.at)
        return any(match.start() < self.at + _MOST_CHARACTERS for match in found)

    def is_id(self) -> bool:
        """In a word with digits that is long, or behind a name of such a word."""
        before, behind = _WORD[0].search(self.text, 0, self.at), _WORD[1].match(self.text, self.at)
        word = (before[0] if before else "") + (behind[0] if behind else "")
        named = _NAMES_ID.search(self.text, max(0, self.at - 96), self.at)
        return _ID.fullmatch(word) is not None or named is not None
