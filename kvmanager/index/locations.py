"""Where KV may live: a tier, and its holder there."""

from enum import StrEnum
from typing import NamedTuple


class Tier(StrEnum):
    """A kind of memory, fastest first."""

    DEVICE = "device"
    """A replica's own block pool. Not shared: only that replica reads it."""
    CPU = "cpu"
    """The Ray object store of one node, owned by its tier actor. Shared."""
    REDIS = "redis"
    """Redis. Shared, and outlives every process of the server."""


class Location(NamedTuple):
    """One place with a budget of its own."""

    tier: Tier
    holder: str
    """Replica id (device), node id (cpu) or the empty string (redis)."""


REDIS = Location(Tier.REDIS, "")
"""The one location of its tier. While its budget is zero, Redis is not there."""
