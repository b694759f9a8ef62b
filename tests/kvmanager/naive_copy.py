"""A segment at a location, as the naive manager sees it."""

from dataclasses import dataclass

from kvmanager.index.locations import REDIS

EPSILON = 1e-9
"""Scores that differ by less are equal."""


@dataclass(eq=False)
class NaiveCopy:
    key: bytes
    nbytes: int
    state: str = "reserved"  # or "committed" or "doomed"
    save_id: int = 0


def coded_bytes(key, nbytes):
    """What a segment takes at Redis: less than in a CPU tier, or as much."""
    return max(1, nbytes - key[0] % 3)


def raw_bytes(location, key, nbytes):
    """What a segment that lies somewhere would take in a CPU tier."""
    return nbytes + key[0] % 3 if location == REDIS else nbytes
