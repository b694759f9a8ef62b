"""The part of a server that lies around the manager: pool, tiers, and the calls made when a request is served.

`Serving.serve` makes the calls that the deployments make, in their order, on the same `kvmanager.manager.KVManager`:
plan, load, prefetch what came from Redis, run, release, offer, commit, demote. What differs is that every move is done
at once and never fails: the simulator counts what is moved, and `load_tests.simulator.costs` says how long it takes.
The reports of what the device pool holds are left out: they serve routers, and here is one replica.
"""

from collections.abc import Sequence
from typing import NamedTuple

from kvmanager.eviction.device_ranks import score_of_rest
from kvmanager.index.locations import REDIS, Location, Tier
from kvmanager.manager import KVManager
from kvmanager.moves.directives import Evict
from kvmanager.moves.plan import Plan, PlanQuery
from kvmanager.segments.keys import BlockHash, SegmentKey
from kvmanager.segments.spans import MARK_BYTES, NodeKind, SegmentSpan
from load_tests.simulator.one_replica.ranked_pool import RankedPool
from load_tests.simulator.trace import TraceRequest, block_key

REPLICA, NODE = "replica", "node"
CPU = Location(Tier.CPU, NODE)
MOST_DEMOTED_BLOCKS = 64
"""In one demotion."""


class Served(NamedTuple):
    """Where the blocks of one prompt came from, leading ones first, and what else was moved. In blocks."""

    blocks: int
    """Of the whole prompt. What is in none of the next three was computed."""
    device: int
    cpu: int
    redis: int
    saved: int
    """Device to CPU tier."""
    promoted: int
    """Of ``redis``: what stays in the CPU tier."""
    demoted: int
    """CPU tier to Redis, in the background after this request."""
    evicted: int
    """From CPU tier and Redis."""


class Serving:
    """One manager, its tiers of given sizes and one replica with its pool. One thread."""

    def __init__(
        self, manager: KVManager, block_bytes: int, cpu_blocks: int, redis_blocks: int = 0, device_blocks: int = 0
    ) -> None:
        """Give the tiers of a new manager their budgets. A tier of no blocks is not there."""
        self._manager = manager
        self._block_bytes = block_bytes
        self._pool = RankedPool(device_blocks) if device_blocks else None
        self._with_redis = redis_blocks > 0
        self._spans: dict[int, SegmentSpan] = {}
        manager.set_budget(CPU, cpu_blocks * block_bytes)
        if redis_blocks:
            manager.set_budget(REDIS, redis_blocks * block_bytes)

    def serve(self, now: float, request: TraceRequest) -> Served:
        """Serve one request, from the plan to the demotions that it brings about."""
        manager = self._manager
        spans = self._spans_of(request)
        hashes = [BlockHash(span.key) for span in spans]
        device = self._pool.leading_blocks(hashes) if self._pool else 0
        plan = manager.plan(now, REPLICA, NODE, PlanQuery(hashes, device_blocks=device))
        from_redis = [segment.key for segment in plan.segments if segment.location == REDIS]
        promoted = evicted = demoted = 0
        if from_redis:
            offer = manager.prefetch(now, REPLICA, CPU, from_redis)
            evicted += _count(offer.evict)
            promoted = self._store(now, offer.keys)
        if self._pool:
            held = hashes[: self._pool.blocks]  # of a prompt longer than the pool, the beginning stays
            self._pool.hold(list(zip(held, _scores(plan, len(hashes)), strict=False)))
            self._pool.let_go(held, plan.now)
        manager.release(plan.lease_id)
        offer = manager.offer(now, REPLICA, CPU, spans, [self._block_bytes] * len(spans))
        evicted += _count(offer.evict)
        saved = self._store(now, offer.keys)
        if self._with_redis:
            demoted, gone = self._demote(now)
            evicted += gone
        return Served(
            blocks=len(spans),
            device=device,
            cpu=len(plan.segments) - len(from_redis),
            redis=len(from_redis),
            saved=saved,
            promoted=promoted,
            demoted=demoted,
            evicted=evicted,
        )

    def _spans_of(self, request: TraceRequest) -> list[SegmentSpan]:
        known = self._spans
        spans: list[SegmentSpan] = []
        parent = None
        for position, hash_id in enumerate(request.hash_ids):
            span = known.get(hash_id)
            if span is None:
                key = SegmentKey(block_key(hash_id))
                span = known[hash_id] = SegmentSpan(key, parent, position, 1, NodeKind.REQUEST, key[:MARK_BYTES])
            spans.append(span)
            parent = span.key
        return spans

    def _store(self, now: float, keys: Sequence[SegmentKey]) -> int:
        if not keys:
            return 0
        return len(self._manager.commit(now, CPU, keys, [self._block_bytes] * len(keys)))

    def _demote(self, now: float) -> tuple[int, int]:
        """Copy to Redis all that waits for it, and relieve the CPU tier; return blocks copied and evicted."""
        manager = self._manager
        demoted, evicted = 0, self._relieve(now)
        while (demotion := manager.next_demotion(now, MOST_DEMOTED_BLOCKS * self._block_bytes)) is not None:
            demoted += len(demotion.keys)
            evicted += _count(demotion.evict)
            stored = dict.fromkeys(demotion.keys, self._block_bytes)
            evicted += _count(manager.finish_demotion(now, demotion.demotion_id, stored))
            evicted += self._relieve(now)
        return demoted, evicted

    def _relieve(self, now: float) -> int:
        evicted = 0
        while directives := self._manager.relieve(now):
            evicted += _count(directives)
        return evicted


def _scores(plan: Plan, blocks: int) -> list[float]:
    """Return the hotness of each block of a prompt; one that the manager knows is a segment of its own."""
    rest = score_of_rest(plan.scores, blocks, plan.now)
    return [score for _, score in plan.scores] + [rest] * (blocks - len(plan.scores))


def _count(directives: Sequence[Evict]) -> int:
    return sum(len(directive.keys) for directive in directives)
