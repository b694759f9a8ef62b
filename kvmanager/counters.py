"""What the manager counts; totals since it started."""

from dataclasses import dataclass


@dataclass(slots=True)
class Counters:
    """Monotonic counts. Blocks are the engine's; a block of a prompt is counted at the tier that it is reused from."""

    plans: int = 0
    prompt_blocks: int = 0
    device_blocks: int = 0
    cpu_blocks: int = 0
    redis_blocks: int = 0
    offered_segments: int = 0
    refused_colder: int = 0
    """Offered segments for which nothing colder could be evicted, or that exceed the whole budget."""
    refused_unknown_parent: int = 0
    """Offered segments whose parent is not stored at the location, nor about to be."""
    refused_other_cut: int = 0
    """Offered segments that are stored elsewhere in another cut."""
    committed_segments: int = 0
    refused_commits: int = 0
    """Commits and adoptions that the manager did not expect or has no room for; the tier frees the bytes."""
    evicted_segments: int = 0
    dropped_segments: int = 0
    expired_leases: int = 0
    expired_reservations: int = 0
