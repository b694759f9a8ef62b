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
    chunk_tokens_asked: int = 0
    """Tokens of the chunks of prompts that ask for at least two."""
    chunk_tokens_found: int = 0
    """Of these, what was stored: with the prompt's beginning, or as the chunk by itself."""
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
    """Ordered evicted, relieved and trimmed ones and what a demotion reserved and did not report included."""
    dropped_segments: int = 0
    expired_leases: int = 0
    expired_reservations: int = 0
    demoted_segments: int = 0
    """Copied to Redis and committed there."""
    refused_demotions: int = 0
    """Segments for which, or for whose chain, Redis had nothing colder to evict, or that exceed its whole budget."""
    dropped_demotions: int = 0
    """Segments that waited to be copied to Redis when more came than the queue holds."""
    expired_demotions: int = 0
    stray_segments: int = 0
    """Written to Redis by a demotion that had ended; ordered evicted there."""
    relieved_segments: int = 0
    """Evicted from a CPU tier above its high-water mark, while Redis keeps them."""
    renewed_segments: int = 0
    """Kept from expiring in Redis because they, or what follows on them, were used."""
    restored_segments: int = 0
    """Lost by Redis, and copied there once more from a CPU tier."""
    promoted_segments: int = 0
    """Copied from Redis to a CPU tier and committed there."""
    refused_promotions: int = 0
    """Segments that are at Redis, but for which a CPU tier has no room or lacks the parent."""
    trimmed_segments: int = 0
    """Evicted because a quota, or what quotas leave to the rest, had shrunk below what was held."""
