"""How much of each layer a sparse segment keeps: a table of shares, counted in eighths, and a digest that names it.

A budget is part of what a sparse prefix is: two tables leave other tokens of the same prompt. So its digest goes into
the names of sparse prefixes, and `level` into the header of a sparse segment. Pure: any thread.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Final

EIGHTHS: Final = 8
LAYERS: Final = "layers"
"""The level that is calibrated for a model, layer by layer: no measured loss."""
UNIFORM: Final = {"75": Fraction(3, 4), "50": Fraction(1, 2), "20": Fraction(1, 5)}
"""Levels that keep one share of every layer, whatever the model loses by it."""
LEVELS: Final = (LAYERS, *UNIFORM)
RECENT_TOKENS: Final = 8
"""What follows a prefix often asks for the tokens just before it, in shallow layers for nothing else, and no query of
the prefix has asked for them yet. With 0 to 2 the demo model loses answers by it, with 4 it does not."""
DIGEST_BYTES: Final = 16
_OF_A_TABLE: Final = 1 << 15
"""Above it a header's level is 15 bits of a table's digest; below it a uniform share in percent."""


@dataclass(frozen=True)
class Budgets:
    """The share that each layer keeps, one after the other. Raises ValueError for what is no table."""

    level: str
    shares: tuple[Fraction, ...]
    recent: int = RECENT_TOKENS
    """Tokens at a segment's end that every layer and head keeps, whatever their mass: H2O's recent tokens."""

    def __post_init__(self) -> None:
        if self.level not in LEVELS:
            raise ValueError(f"there is no level {self.level!r} of sparse KV; there are {', '.join(LEVELS)}")
        if not self.shares or not all(0 < share <= 1 for share in self.shares):
            raise ValueError("a budget keeps more than nothing of every layer, and at most all of it")
        if self.recent < 0:
            raise ValueError("a budget keeps no negative number of recent tokens")
        if self.level == LAYERS and any((share * EIGHTHS).denominator != 1 for share in self.shares):
            raise ValueError("a calibrated budget counts in eighths of a segment")
        if self.level != LAYERS and set(self.shares) != {UNIFORM[self.level]}:
            raise ValueError(f"level {self.level} keeps {UNIFORM[self.level]} of every layer")

    @classmethod
    def of_eighths(cls, eighths: Sequence[int], recent: int = RECENT_TOKENS) -> Budgets:
        """A calibrated table. Raises ValueError."""
        return cls(LAYERS, tuple(Fraction(number, EIGHTHS) for number in eighths), recent)

    @classmethod
    def uniform(cls, level: str, layers: int) -> Budgets:
        """The table of a uniform level. Raises ValueError."""
        if level not in UNIFORM:
            raise ValueError(f"{level!r} is no uniform level of sparse KV; there are {', '.join(UNIFORM)}")
        return cls(level, (UNIFORM[level],) * layers)

    @property
    def digest(self) -> bytes:
        """16 bytes that name the table, for the names of sparse prefixes."""
        shares = ",".join(f"{share.numerator}/{share.denominator}" for share in self.shares)
        return hashlib.sha256(f"crosskv-sparse-budgets:{shares}:{self.recent}".encode()).digest()[:DIGEST_BYTES]

    @property
    def header_level(self) -> int:
        """What a segment's header says of the table; that it is this one, its sections' counts say."""
        if self.level in UNIFORM:
            return int(self.level)
        return _OF_A_TABLE | int.from_bytes(self.digest[:2], "little") % _OF_A_TABLE

    def kept_blocks(self, layer: int, num_blocks: int) -> int:
        """Return how many of a segment's blocks a layer keeps: its share, rounded up, so at least one."""
        share = self.shares[layer]
        return -(-num_blocks * share.numerator // share.denominator)
