"""What the manager can be told."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ManagerConfig:
    """Settings of one `kvmanager.manager.KVManager`. Raises ValueError for what cannot work."""

    blocks_per_segment: int
    lease_s: float = 30.0
    """How long a plan keeps its segments from being evicted: longer than the slowest load."""
    save_s: float = 30.0
    """How long a reservation waits for its commit: longer than the slowest save or demotion."""
    half_life_requests: float = 1000.0
    """After this many requests a use counts half. The best value on the shared conversation trace."""
    max_ghosts: int = 100_000
    """Segments remembered, with their hotness, though nothing is stored for them; about 400 bytes each."""
    max_deltas: int = 65_536
    """Events kept for mirrors: one that has missed more fetches a snapshot."""
    eviction_policy: str = "lfu"
    """One of `kvmanager.policies`."""
    cpu_high_water: float = 0.9
    """Share of a CPU tier's budget above which its coldest segments move to Redis."""
    redis_min_uses: float = 1.0
    """A segment used so often (`kvmanager.demotion_queue`) is copied to Redis; 1: every segment when it is stored."""

    def __post_init__(self) -> None:
        if self.blocks_per_segment < 1:
            raise ValueError(f"blocks_per_segment must be at least 1, got {self.blocks_per_segment}")
        if min(self.lease_s, self.save_s) <= 0:
            raise ValueError(f"lease_s and save_s must be positive, got {self.lease_s} and {self.save_s}")
        if self.max_ghosts < 0:
            raise ValueError(f"max_ghosts must not be negative, got {self.max_ghosts}")
        if not 0 < self.cpu_high_water <= 1:
            raise ValueError(f"cpu_high_water must be a share above 0 and up to 1, got {self.cpu_high_water}")
        if not self.redis_min_uses >= 1:
            raise ValueError(f"redis_min_uses must be at least 1, got {self.redis_min_uses}")
