"""What the manager's counters count (`kvmanager.index.counters`), in a sentence each, for `/metrics`."""

from __future__ import annotations

COUNTER_TEXTS = {
    "plans": "Plans made for prompts.",
    "prompt_blocks": "Blocks of the prompts that were planned.",
    "device_blocks": "Blocks of prompts that were planned to be reused on the device.",
    "cpu_blocks": "Blocks of prompts that were planned to be loaded from a CPU tier.",
    "redis_blocks": "Blocks of prompts that were planned to be loaded from Redis.",
    "offered_segments": "Segments that replicas offered to the CPU tier.",
    "refused_colder": "Offered segments for which nothing colder could be evicted, or that exceed the budget.",
    "refused_unknown_parent": "Offered segments whose parent is not stored there, nor about to be.",
    "refused_other_cut": "Offered segments that are stored elsewhere in another cut.",
    "refused_twins": "Segments not indexed because too many begin with their first block.",
    "committed_segments": "Segments that a CPU tier has stored.",
    "refused_commits": "Commits that the manager did not expect or has no room for; the tier frees the bytes.",
    "evicted_segments": "Segments ordered evicted, for whatever reason.",
    "dropped_segments": "Segments that a tier has lost or given up by itself.",
    "expired_leases": "Leases whose replica did not give them back in time.",
    "expired_reservations": "Saves that did not end in time.",
    "demoted_segments": "Segments copied to Redis.",
    "refused_demotions": "Copies to Redis without room: nothing there was colder.",
    "dropped_demotions": "Copies to Redis that waited too long in a full queue.",
    "expired_demotions": "Copies to Redis that did not end in time.",
    "stray_segments": "Segments written to Redis by a copy that had ended; evicted there.",
    "relieved_segments": "Segments evicted from a CPU tier above its high-water mark, while Redis keeps them.",
    "renewed_segments": "Segments kept from expiring in Redis because they were used.",
    "restored_segments": "Segments that Redis lost, copied there once more.",
    "promoted_segments": "Segments copied from Redis to a CPU tier.",
    "refused_promotions": "Segments at Redis for which a CPU tier has no room, or lacks the parent.",
    "trimmed_segments": "Segments evicted because a quota had shrunk below what was held.",
}
