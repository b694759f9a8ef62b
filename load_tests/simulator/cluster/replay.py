"""Replays a trace on N replicas behind a router: the manager's own core, its mirror, and simulated engines.

What is real: the index, the plans, the saves and the demotions (`kvmanager.manager`), the numbered deltas and the
mirror that a router looks at, ``mirror_lag_s`` late (`kvmanager.routing.mirror`), the credits, as they would be
measured (`kvmanager.loading.load_rates`), and the router ``ours`` (`kvmanager.routing`, `kvmanager.routing.spreading`).
What is simulated:
engines and pools (`cluster_replica`, `device_pool`). What is left out: the interplay of prefill and decode in one
engine step, answers (a trace does not say which blocks an answer filled), contention between loads, the time of saves
and of calls, and replicas that fail. A trace block is a segment of one block.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from kvmanager.config import ManagerConfig
from kvmanager.index.deltas import Deltas, Position
from kvmanager.index.locations import REDIS, Location, Tier
from kvmanager.loading.load_rates import LoadRates
from kvmanager.manager import KVManager
from kvmanager.moves.plan import PlanQuery
from kvmanager.routing.cost import STARTING_CREDITS
from kvmanager.routing.mirror import PlacementMirror
from kvmanager.routing.spreading import Spread
from kvmanager.segments.keys import BlockHash
from kvmanager.segments.spans import split_segments
from load_tests.simulator.cluster.replica import Job, SimulatedReplica
from load_tests.simulator.cluster.report import ClusterBooks
from load_tests.simulator.cluster.routers import Prompt, Router, make_router
from load_tests.simulator.costs import Costs
from load_tests.simulator.events import Events
from load_tests.simulator.policies import served_name
from load_tests.simulator.trace import BLOCK_TOKENS, TraceRequest, block_key

CPU = Location(Tier.CPU, "node")
MOST_EVENTS = 1_000_000
LOAD_AIM = 0.65
"""Share of the replicas' prefill rate that a trace asks for when no rate is given and whatever recurs is reused."""


def chosen_rate_scale(trace: Sequence[TraceRequest], replicas: int, costs: Costs) -> float:
    """Return how much faster a trace must be replayed to keep replicas `LOAD_AIM` busy with what no cache can save."""
    seen: set[int] = set()
    fresh = 0
    for request in trace:
        known = next((n for n, block in enumerate(request.hash_ids) if block not in seen), len(request.hash_ids))
        fresh += max(1, request.input_tokens - known * BLOCK_TOKENS)
        seen.update(request.hash_ids)
    span_s = trace[-1].timestamp_s - trace[0].timestamp_s
    return LOAD_AIM * replicas * costs.prefill_tokens_per_s * span_s / fresh if span_s > 0 else 1.0


def simulate(
    trace: Sequence[TraceRequest],
    replicas: int,
    router: str,
    device_blocks: int,
    cpu_blocks: int,
    costs: Costs,
    seed: int,
    *,
    policy: str = "lfu",
    redis_blocks: int = 0,
    rate_scale: float | None = None,
    mirror_lag_s: float = 0.02,
    on_progress: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Replay ``trace``, in order of time, and return plain numbers (`cluster_report`), the same for the same arguments.

    ``policy`` is that of the shared tiers. ``device_blocks`` is per replica, the other sizes are of the tiers that all
    share, in trace blocks; ``rate_scale`` divides the time between requests (None: `chosen_rate_scale`);
    ``on_progress`` is told the requests that have arrived. Raises ValueError for an unknown router or policy, an empty
    trace, and a request that a device pool cannot hold.
    """
    if not trace:
        raise ValueError("a trace without requests cannot be replayed")
    if replicas < 1 or device_blocks < 1:
        raise ValueError(f"at least one replica with one block is needed, got {replicas} with {device_blocks}")
    scale = chosen_rate_scale(trace, replicas, costs) if rate_scale is None else rate_scale
    if not scale > 0:
        raise ValueError(f"rate_scale must be positive, got {scale}")
    cluster = Cluster(replicas, router, policy, device_blocks, cpu_blocks, redis_blocks, costs, seed, mirror_lag_s)
    books = cluster.replay(trace, scale, on_progress)
    return {"router": router, "replicas": replicas, "rate_scale": scale, **books.report()}


class Cluster:
    """One replay: the clock, the replicas, the manager. Also what replicas and routers see of it."""

    def __init__(
        self,
        replicas: int,
        router: str,
        policy: str,
        device_blocks: int,
        cpu_blocks: int,
        redis_blocks: int,
        costs: Costs,
        seed: int,
        mirror_lag_s: float,
    ) -> None:
        self._costs = costs
        self._device_blocks = device_blocks
        self._block_bytes = costs.kv_bytes_per_token * BLOCK_TOKENS
        config = ManagerConfig(
            blocks_per_segment=1, cpu_high_water=1.0, eviction_policy=served_name(policy), policy_seed=seed
        )
        self._brain = KVManager(config, epoch=1)
        self._brain.set_budget(CPU, cpu_blocks * self._block_bytes)
        self._brain.set_budget(REDIS, redis_blocks * self._block_bytes)
        self._rates = LoadRates(STARTING_CREDITS)
        self._mirror_lag_s = mirror_lag_s
        self._untold: deque[tuple[float, Deltas]] = deque()
        """Events that the mirror does not know yet, with the time when they happened."""
        self.mirror = PlacementMirror(blocks_per_segment=1)
        self.mirror.apply(self._brain.deltas_since(self.mirror.position, MOST_EVENTS))
        self._numbered = self.mirror.position
        self._events = Events()
        self._replicas = {
            str(n): SimulatedReplica(
                str(n), device_blocks, costs, self, self._events.at, self._first_token, self._ended
            )
            for n in range(replicas)
        }
        self.names = list(self._replicas)
        self._books = ClusterBooks(self.names, self._block_bytes)
        self._router: Router = make_router(router, self, seed)

    def replay(
        self, trace: Sequence[TraceRequest], scale: float, on_progress: Callable[[int], None] | None
    ) -> ClusterBooks:
        """Run until the last request has ended. Raises ValueError for a request that no pool can hold."""
        first_s = trace[0].timestamp_s
        for number, request in enumerate(trace):
            arrival_s = (request.timestamp_s - first_s) / scale
            self._events.run_until(arrival_s)
            self._arrive(arrival_s, str(number), request)
            if on_progress is not None:
                on_progress(number + 1)
        self._events.run_until()
        return self._books

    # What a router sees.

    def ongoing(self, replica: str) -> int:
        """Requests that a replica has and has not ended, as a probe tells it."""
        return self._replicas[replica].ongoing

    def credits(self) -> dict[Tier, float]:
        """The measured credits."""
        return self._rates.credits()

    # What a replica asks of the manager: `cluster_replica.SharedTiers`.

    def load(self, now: float, replica: str, hashes: Sequence[BlockHash], device_blocks: int) -> tuple[int, int, int]:
        """See there."""
        plan = self._brain.plan(now, replica, CPU.holder, PlanQuery(hashes, device_blocks=device_blocks))
        cpu = sum(segment.location == CPU for segment in plan.segments)
        return cpu, len(plan.segments) - cpu, plan.lease_id

    def release(self, lease_id: int) -> None:
        """See there."""
        self._brain.release(lease_id)

    def save(self, now: float, replica: str, hashes: Sequence[BlockHash]) -> None:
        """See there. Storing takes no time here, and neither does copying to Redis."""
        spans = split_segments(hashes, 0, len(hashes), 1, len(hashes))
        offer = self._brain.offer(now, replica, CPU, spans, [self._block_bytes] * len(spans))
        self._brain.commit(now, CPU, offer.keys, [self._block_bytes] * len(offer.keys))
        self._books.saved_blocks += len(offer.keys)
        while (demotion := self._brain.next_demotion(now, len(spans) * self._block_bytes)) is not None:
            self._brain.finish_demotion(now, demotion.demotion_id, dict.fromkeys(demotion.keys, self._block_bytes))
            self._books.demoted_blocks += len(demotion.keys)
        self._note_events(now)

    def device_changed(
        self, now: float, replica: str, stored: Sequence[BlockHash], removed: Sequence[BlockHash]
    ) -> None:
        """See there."""
        self._brain.device_removed(replica, removed)
        self._brain.device_stored(replica, stored)
        self._note_events(now)

    # Inside.

    def _arrive(self, now: float, request_id: str, request: TraceRequest) -> None:
        hashes = [block_key(block) for block in request.hash_ids]
        answer_blocks = -(-request.output_tokens // BLOCK_TOKENS)
        if len(hashes) + answer_blocks > self._device_blocks:
            raise ValueError(
                f"request {request_id} needs {len(hashes) + answer_blocks} blocks, a device pool has "
                f"{self._device_blocks}: give it more device blocks"
            )
        self._follow_placement(now)
        name = self._router.choose(Prompt(request_id, hashes, request.hash_ids, request.input_tokens), now)
        job = Job(request_id, now, request.input_tokens, request.output_tokens, answer_blocks, hashes, BLOCK_TOKENS)
        replica = self._replicas[name]
        for move in self._router.take_moves():
            self._move(now, move)
        replica.arrive(now, job)
        self._books.queued(replica.waiting)

    def _follow_placement(self, now: float) -> None:
        """Let the mirror know what happened until ``mirror_lag_s`` ago."""
        while self._untold and self._untold[0][0] <= now - self._mirror_lag_s:
            self.mirror.apply(self._untold.popleft()[1])

    def _note_events(self, now: float) -> None:
        deltas = self._brain.deltas_since(self._numbered, MOST_EVENTS)
        self._numbered = Position(deltas.last)
        self._untold.append((now, deltas))

    def _first_token(self, now: float, replica: str, job: Job) -> None:
        costs = self._costs
        self._rates.prefilled(job.computed_tokens, costs.prefill_s(job.computed_tokens))
        for tier, tokens in ((Tier.CPU, job.cpu_tokens), (Tier.REDIS, job.redis_tokens)):
            if tokens:
                self._rates.loaded(tier, tokens, tokens * costs.kv_bytes_per_token, costs.load_s(tier, tokens))
        self._books.first_token(now, replica, job)
        self._router.first_token(job.request_id)

    def _ended(self, now: float, replica: str, job: Job) -> None:
        self._router.finished(job.request_id)

    def _move(self, now: float, move: Spread) -> None:
        """Copy what the target lacks of a prefix: from a shared tier, or from the other device through host memory."""
        lacking = self._replicas[move.target].pool.leading_blocks(move.hashes)
        found = self.mirror.coverage(move.hashes, move.target)
        at_cpu, reach = found.device + found.cpu, sum(found)
        reach = max(reach, self._replicas[move.source].pool.leading_blocks(move.hashes))
        blocks = move.hashes[lacking:reach]
        if not blocks:
            return
        seconds = self._costs.load_s(Tier.CPU, len(blocks) * BLOCK_TOKENS)
        if at_cpu < reach:  # it has to be brought to host memory first
            seconds *= 2

        def arrived(then: float) -> None:
            self._books.moved_blocks += self._replicas[move.target].bring(then, blocks)
            self._books.moves += 1

        self._events.at(now + seconds, arrived)
