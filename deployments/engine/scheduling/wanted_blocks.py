"""How much KV an engine's queue waits for: what running requests hold says nothing of whom they keep out.

Leans on vLLM's `Scheduler`: `waiting` (a deque, or by priority a heap in `_heap`), `running`, `max_num_active_reqs`,
`num_waiting_for_streaming_input`, `_is_blocked_waiting_status`, `block_size`.
"""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.sched.scheduler import Scheduler

LOOKED_AT = 8
"""Requests at the queue's head. A long queue is as short of KV as these."""


def wanted_blocks(scheduler: Scheduler, free_blocks: int) -> int:
    """Blocks that the first waiting requests need, of which the very first one does not fit into what is free.

    0 where it fits, and where run slots are what is missing. Of a heap's first ones, which need not be the next. On the
    engine's thread; O(1).
    """
    if len(scheduler.running) + scheduler.num_waiting_for_streaming_input >= scheduler.max_num_active_reqs:
        return 0
    waiting: Any = scheduler.waiting
    first = islice(getattr(waiting, "_heap", waiting), LOOKED_AT)
    ready = [request for request in first if not scheduler._is_blocked_waiting_status(request.status)]
    needs = [-(-request.num_tokens // scheduler.block_size) for request in ready]
    return sum(needs) if needs and needs[0] > free_blocks else 0
