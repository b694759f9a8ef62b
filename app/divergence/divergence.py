"""Where two prompts part, and where they come together again. Tokens are native 32-bit integers, in bytes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

ID_BYTES = 4
MOST_APART = 256
"""Tokens that a piece may have which only one of the prompts holds."""
_SKIPPED = (16, 64, MOST_APART)
"""How far behind the divergence the same tokens are looked for, one after another."""


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
