"""What the manager can be told."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ManagerConfig:
    """Settings of one `kvmanager.manager.KVManager`. Raises ValueError for what cannot work."""

    blocks_per_segment: int
    block_tokens: int = 32
    load_or_recompute: str = "auto"
    """What plans load of what is stored: a `kvmanager.loading.load_choice.LoadMode`."""
    extensions: tuple[str, ...] = ()
    """Names of what may add to plans; those that are none of `kvmanager.extensions` mean nothing here."""
    load_base_s: float = 2.0
    """Time that any load may take; `kvmanager.loading.prefix_load` adds to it for the bytes."""
    lease_s: float = 30.0
    """How long a plan keeps its segments from being evicted, in addition to the time that its load may take."""
    save_s: float = 30.0
    """How long a reservation waits for its commit: longer than the slowest save or demotion."""
    half_life_requests: float = 1000.0
    """After this many requests a use counts half. The best value on the shared conversation trace."""
    max_ghosts: int = 100_000
    """Segments remembered, with their hotness, though nothing is stored for them; about 400 bytes each."""
    max_deltas: int = 65_536
    """Events kept for mirrors: one that has missed more fetches a snapshot."""
    eviction_policy: str = "lfu"
    """One of `kvmanager.eviction.policies`, or a class as "module:Class"; the manager refuses what is none."""
    policy_seed: int = 0
    """For what a policy draws by chance."""
    cpu_high_water: float = 0.9
    """Share of a CPU tier's budget above which its coldest segments move to Redis."""
    redis_min_uses: float = 1.0
    """A segment used so often (`kvmanager.index.demotion_queue`) is copied to Redis; 1: every segment when it is
    stored."""
    redis_renew_s: float = 0.0
    """How long a segment at Redis that is used needs no renewal (`kvmanager.moves.renewals`); 0: nothing expires
    there."""
    pin_budget_bytes: int = 0
    """Bytes that pins may keep from being evicted, each segment counted once; 0: nothing can be pinned."""
    tenant_pin_bytes: Mapping[str, int] | None = None
    """By tenant tag, its part of ``pin_budget_bytes``; other tenants may pin nothing. None: all tenants share it."""
    longest_pin_s: float = 86_400.0
    """The longest time to live of a pin."""

    def __post_init__(self) -> None:
        if self.blocks_per_segment < 1:
            raise ValueError(f"blocks_per_segment must be at least 1, got {self.blocks_per_segment}")
        if min(self.lease_s, self.save_s) <= 0:
            raise ValueError(f"lease_s and save_s must be positive, got {self.lease_s} and {self.save_s}")
        if self.pin_budget_bytes < 0 or self.longest_pin_s <= 0:
            raise ValueError(
                "pin_budget_bytes must not be negative and longest_pin_s must be positive, "
                f"got {self.pin_budget_bytes} and {self.longest_pin_s}"
            )
        if self.max_ghosts < 0:
            raise ValueError(f"max_ghosts must not be negative, got {self.max_ghosts}")
        if not 0 < self.cpu_high_water <= 1:
            raise ValueError(f"cpu_high_water must be a share above 0 and up to 1, got {self.cpu_high_water}")
        if not self.redis_renew_s >= 0:
            raise ValueError(f"redis_renew_s must not be negative, got {self.redis_renew_s}")
        if not self.redis_min_uses >= 1:
            raise ValueError(f"redis_min_uses must be at least 1, got {self.redis_min_uses}")
