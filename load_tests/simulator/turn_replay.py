"""Replays conversations on replicas with small devices and a large CPU tier: is a next turn's KV on the device?

A *next turn* is a request whose prompt begins with all full blocks of an earlier request's prompt, two at least (one is
what all prompts share of a system prompt). Its KV is *found* when all that the earlier request left, prompt and
answer, is on the device of the replica that the next turn is routed to.

The routing (`kvmanager.routing`) is the one that serves. Simplified: each replica prefills one request after the other,
what it computes is in the CPU tier when its prefill ends, a replica's loads share one link, and the CPU tier loses
nothing. Where the trace says what the answer's blocks are named (the next turn does), they are; the others get names
that no prompt asks for.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

from kvmanager.eviction.device_ranks import score_of_rest
from kvmanager.index.hotness import HotnessClock
from kvmanager.index.locations import Tier
from kvmanager.routing.cost import RoutingState
from kvmanager.routing.mirror import TierHits
from kvmanager.segments.keys import BlockHash
from load_tests.simulator.costs import Costs
from load_tests.simulator.events import Events
from load_tests.simulator.one_replica.ranked_pool import RankedPool
from load_tests.simulator.trace import BLOCK_TOKENS, TraceRequest, block_key


@dataclass(slots=True, eq=False)
class Turn:
    """One request. ``hashes`` are the prompt's blocks, the last may be partly filled; ``left`` is what stays of it."""

    number: int
    request: TraceRequest
    hashes: list[BlockHash]
    prompt_blocks: int
    """Full ones."""
    previous: Turn | None = None
    left: list[BlockHash] = field(default_factory=list)
    """Its full blocks, the answer's among them."""
    scored: list[tuple[BlockHash, float]] = field(default_factory=list)
    """`left`, each block with its hotness."""
    replica: str = ""
    known_blocks: int = 0
    """Of a next turn: leading blocks that the turn before has left."""
    found_blocks: int = 0
    device_blocks: int = 0
    loaded_blocks: int = 0
    arrival_s: float = 0.0
    ttft_s: float = 0.0


def find_turns(trace: Sequence[TraceRequest]) -> list[Turn]:
    """Return the requests with their predecessors: the one that covers most of the prompt, the latest of equals."""
    turns: list[Turn] = []
    by_end: dict[int, Turn] = {}
    nameless = itertools.count(-1, -1)
    followed: dict[Turn, Turn] = {}
    for number, request in enumerate(trace):
        ids = request.hash_ids
        full = request.input_tokens // BLOCK_TOKENS
        turn = Turn(number, request, [block_key(block) for block in ids], full)
        for end in range(full, 0, -1):
            if (previous := by_end.get(ids[end - 1])) is not None:
                turn.previous = previous
                followed.setdefault(previous, turn)
                break
        if full > 1:
            by_end[ids[full - 1]] = turn
        turns.append(turn)
    for turn in turns:
        follower = followed.get(turn)
        blocks = (turn.request.input_tokens + turn.request.output_tokens) // BLOCK_TOKENS
        turn.left = turn.hashes[: turn.prompt_blocks]
        if follower is not None:
            turn.left += follower.hashes[turn.prompt_blocks : min(blocks, follower.prompt_blocks)]
        turn.left += [_nameless(next(nameless)) for _ in range(blocks - len(turn.left))]
    return turns


def _nameless(number: int) -> BlockHash:
    return BlockHash(b"answer" + number.to_bytes(26, "big", signed=True))


class _Replica:
    def __init__(self, device_blocks: int) -> None:
        self.pool = RankedPool(device_blocks)
        self.waiting: deque[Turn] = deque()
        self.engine_until = 0.0
        self.link_until = 0.0


class TurnReplay:
    """One arm: devices evict by rank, or, not ``by_hotness``, what was used least recently."""

    def __init__(
        self,
        replicas: int,
        device_blocks: int,
        costs: Costs,
        by_hotness: bool,
        half_life_requests: float = 1000.0,
    ) -> None:
        self._costs = costs
        self._replicas = {str(n): _Replica(device_blocks) for n in range(replicas)}
        self._clock = HotnessClock(half_life_requests) if by_hotness else None
        self._hotness: dict[BlockHash, float] = {}
        self._cpu: set[BlockHash] = set()
        self._routing = RoutingState(BLOCK_TOKENS)
        recompute_s = costs.prefill_s(BLOCK_TOKENS)
        self._routing.credits[Tier.CPU] = max(0.0, 1.0 - costs.load_s(Tier.CPU, BLOCK_TOKENS) / recompute_s)
        self._events = Events()

    def run(self, turns: Sequence[Turn], on_progress: Callable[[], None] = lambda: None) -> None:
        """Serve all turns, and write into them what they found. Raises ValueError for one that fits no device."""
        first_s = turns[0].request.timestamp_s

        def arrive(now: float, turn: Turn) -> None:
            self._arrive(now, turn)
            on_progress()

        for turn in turns:
            self._events.at(turn.request.timestamp_s - first_s, partial(arrive, turn=turn))
        self._events.run_until()

    def _arrive(self, now: float, turn: Turn) -> None:
        turn.arrival_s, turn.replica = now, self._route(now, turn)
        name = turn.replica
        replica = self._replicas[name]
        if turn.previous is not None:
            left = turn.previous.left
            turn.known_blocks = next(
                (n for n, (a, b) in enumerate(zip(left, turn.hashes, strict=False)) if a != b),
                min(len(left), turn.prompt_blocks),
            )
            turn.found_blocks = replica.pool.leading_blocks(turn.hashes[: turn.known_blocks])
        if len(turn.left) + 1 > replica.pool.blocks:
            raise ValueError(
                f"request {turn.number + 1} needs {len(turn.left) + 1} blocks, a device has {replica.pool.blocks}: "
                "give the devices more blocks"
            )
        self._count_use(turn)
        replica.waiting.append(turn)
        self._start(now, replica)

    def _route(self, now: float, turn: Turn) -> str:
        hits: dict[str, TierHits] = {}
        stored = next((n for n, block in enumerate(turn.hashes) if block not in self._cpu), len(turn.hashes))
        for name, replica in self._replicas.items():
            device = replica.pool.leading_blocks(turn.hashes)
            hits[name] = TierHits(device, max(0, stored - device), 0)
        tokens = turn.request.input_tokens
        name = self._routing.rank(list(self._replicas), hits, tokens, now)[0]
        uncached = max(0, tokens - sum(hits[name]) * BLOCK_TOKENS)
        self._routing.route(str(turn.number), name, uncached, len(turn.hashes), now)
        return name

    def _start(self, now: float, replica: _Replica) -> None:
        """Begin waiting turns in order, until the device has no room for the next."""
        while replica.waiting:
            turn = replica.waiting[0]
            prompt = turn.hashes[: turn.prompt_blocks]
            device = replica.pool.leading_blocks(prompt)
            if not replica.pool.hold(turn.scored, unnamed=1):
                return
            replica.waiting.popleft()
            stored = next((n for n, block in enumerate(prompt) if block not in self._cpu), len(prompt))
            turn.device_blocks, turn.loaded_blocks = device, max(0, stored - device)
            begins = now
            if turn.loaded_blocks:
                load_s = self._costs.load_s(Tier.CPU, turn.loaded_blocks * BLOCK_TOKENS)
                begins = replica.link_until = max(now, replica.link_until) + load_s
            tokens = max(1, turn.request.input_tokens - max(device, stored) * BLOCK_TOKENS)
            replica.engine_until = max(begins, replica.engine_until) + self._costs.prefill_s(tokens)
            turn.ttft_s = replica.engine_until - turn.arrival_s
            self._events.at(replica.engine_until, partial(self._first_token, turn=turn))

    def _first_token(self, now: float, turn: Turn) -> None:
        self._routing.first_token(str(turn.number))
        self._cpu.update(turn.hashes[: turn.prompt_blocks])
        decode_s = turn.request.output_tokens * self._costs.decode_s_per_token
        self._events.at(now + decode_s, partial(self._end, turn=turn))

    def _end(self, now: float, turn: Turn) -> None:
        self._routing.finished(str(turn.number))
        replica = self._replicas[turn.replica]
        replica.pool.let_go(turn.left, self._now, unnamed=1)
        self._cpu.update(turn.left)
        self._start(now, replica)

    @property
    def _now(self) -> float:
        return self._clock.now if self._clock else 0.0

    def _count_use(self, turn: Turn) -> None:
        """Note how hot its blocks are, as its plan says when it arrives."""
        known: list[tuple[int, float]] = []
        if self._clock is not None:
            self._clock.tick()
            for end, block in enumerate(turn.hashes[: turn.prompt_blocks], start=1):
                if (before := self._hotness.get(block)) is None:
                    break
                self._hotness[block] = self._clock.used(before)
                known.append((end, self._hotness[block]))
            for block in turn.left[len(known) :]:
                self._hotness.setdefault(block, self._now)
        scores = [score for _, score in known]
        rest = score_of_rest(known, len(turn.left), self._now)
        turn.scored = list(zip(turn.left, scores + [rest] * (len(turn.left) - len(known)), strict=True))
