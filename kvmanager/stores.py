"""What one location may hold and does hold, in bytes."""

from kvmanager.locations import Location
from kvmanager.policies.base import EvictionPolicy


class Store:
    """The budget and the eviction order of one shared location."""

    __slots__ = ("budget_bytes", "location", "policy", "reserved_bytes", "resident_segments", "used_bytes")

    def __init__(self, location: Location, policy: EvictionPolicy) -> None:
        self.location = location
        self.policy = policy
        self.budget_bytes = 0
        self.used_bytes = 0
        """Of all copies, whatever their state: what the tier holds and what it was allowed to fetch."""
        self.reserved_bytes = 0
        """The part of ``used_bytes`` that is only promised."""
        self.resident_segments = 0

    @property
    def free_bytes(self) -> int:
        """Bytes that may still be reserved without evicting."""
        return self.budget_bytes - self.used_bytes
