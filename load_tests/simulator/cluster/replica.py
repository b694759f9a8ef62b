"""One simulated replica: a queue, one engine that prefills, a device pool, and loads next to the engine's work.

What follows vLLM: requests start in order of arrival; one that has KV to load gives way while it loads, and goes on
before those behind it; one that finds no room in the pool holds up the queue until a running request ends; KV can be
found by others when it is computed or loaded, not before.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Protocol

from kvmanager.index.locations import Tier
from kvmanager.segments.keys import BlockHash
from load_tests.simulator.cluster.device_pool import DevicePool, Held
from load_tests.simulator.costs import Costs

Schedule = Callable[[float, Callable[[float], None]], None]
"""Call something at a time, in seconds."""


class SharedTiers(Protocol):
    """What a replica asks of the manager."""

    def load(self, now: float, replica: str, hashes: Sequence[BlockHash], device_blocks: int) -> tuple[int, int, int]:
        """Plan a prompt: the blocks that CPU tier and Redis add to those on the device, and the lease."""

    def release(self, lease_id: int) -> None:
        """End a plan's lease."""

    def save(self, now: float, replica: str, hashes: Sequence[BlockHash]) -> None:
        """Offer a computed prompt."""

    def device_changed(
        self, now: float, replica: str, stored: Sequence[BlockHash], removed: Sequence[BlockHash]
    ) -> None:
        """Report what entered and left a device pool."""


@dataclass(slots=True, eq=False)
class Job:
    """One request and what became of it. Tokens are counted at the tier that they were reused from."""

    request_id: str
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    answer_blocks: int
    hashes: Sequence[BlockHash]
    block_tokens: int
    held: Held = field(default_factory=Held)
    lease_id: int = 0
    hit_blocks: tuple[int, int, int] = (0, 0, 0)
    device_tokens: int = 0
    cpu_tokens: int = 0
    redis_tokens: int = 0
    computed_tokens: int = 0
    first_token_s: float = 0.0

    def count(self) -> None:
        """Turn hits in blocks into tokens. At least one token of a prompt is computed, for the first to be sampled."""
        ends, tokens = 0, [0]
        for blocks in self.hit_blocks:
            ends += blocks
            tokens.append(min(ends * self.block_tokens, self.prompt_tokens - 1))
        self.device_tokens, self.cpu_tokens, self.redis_tokens = (b - a for a, b in pairwise(tokens))
        self.computed_tokens = self.prompt_tokens - tokens[-1]


class SimulatedReplica:
    """See the module. ``first_token`` and ``ended`` are called with the job when that happens."""

    def __init__(
        self,
        name: str,
        device_blocks: int,
        costs: Costs,
        tiers: SharedTiers,
        schedule: Schedule,
        first_token: Callable[[float, str, Job], None],
        ended: Callable[[float, str, Job], None],
    ) -> None:
        self.name = name
        self.pool = DevicePool(device_blocks)
        self.ongoing = 0
        self._costs = costs
        self._tiers = tiers
        self._schedule = schedule
        self._first_token = first_token
        self._ended = ended
        self._waiting: deque[Job] = deque()
        self._loaded: deque[Job] = deque()
        self._prefilling = False

    @property
    def waiting(self) -> int:
        """Requests that have arrived and not begun."""
        return len(self._waiting) + len(self._loaded)

    def arrive(self, now: float, job: Job) -> None:
        """Take a request."""
        self.ongoing += 1
        self._waiting.append(job)
        self._go_on(now)

    def bring(self, now: float, blocks: Sequence[BlockHash]) -> int:
        """Put blocks into the pool that were copied here without a request; return how many were new."""
        new = self.pool.bring(blocks)
        self._report(now, new)
        return len(new)

    def _go_on(self, now: float) -> None:
        while not self._prefilling:
            if self._loaded:
                self._prefill(now, self._loaded.popleft())
            elif not self._waiting or not self._begin(now, self._waiting[0]):
                return

    def _begin(self, now: float, job: Job) -> bool:
        """Start the first of the queue; False when the pool has no room for it yet."""
        device = self.pool.leading_blocks(job.hashes)
        held = self.pool.acquire(job.hashes, device, job.answer_blocks)
        if held is None:
            return False
        self._waiting.popleft()
        self._report(now, ())
        job.held = held
        cpu, redis, job.lease_id = self._tiers.load(now, self.name, job.hashes, device)
        job.hit_blocks = (device, cpu, redis)
        job.count()
        if cpu or redis:
            load_s = self._costs.load_s(Tier.CPU, job.cpu_tokens) + self._costs.load_s(Tier.REDIS, job.redis_tokens)
            self._schedule(now + load_s, lambda then: self._load_ended(then, job))
        else:
            self._prefill(now, job)
        return True

    def _load_ended(self, now: float, job: Job) -> None:
        self._tiers.release(job.lease_id)
        device = job.hit_blocks[0]
        self._report(now, self.pool.publish(job.held, job.hashes[device : sum(job.hit_blocks)]))
        self._loaded.append(job)
        self._go_on(now)

    def _prefill(self, now: float, job: Job) -> None:
        self._prefilling = True
        self._schedule(now + self._costs.prefill_s(job.computed_tokens), lambda then: self._prefill_ended(then, job))

    def _prefill_ended(self, now: float, job: Job) -> None:
        self._prefilling = False
        job.first_token_s = now
        self._report(now, self.pool.publish(job.held, job.hashes[sum(job.hit_blocks) :]))
        self._tiers.save(now, self.name, job.hashes)
        self._first_token(now, self.name, job)
        self._schedule(now + job.output_tokens * self._costs.decode_s_per_token, lambda then: self._end(then, job))
        self._go_on(now)

    def _end(self, now: float, job: Job) -> None:
        self.ongoing -= 1
        self.pool.release(job.held)
        self._ended(now, self.name, job)
        self._go_on(now)

    def _report(self, now: float, stored: Sequence[BlockHash]) -> None:
        evicted = self.pool.take_evicted()
        if stored or evicted:
            self._tiers.device_changed(now, self.name, stored, evicted)
