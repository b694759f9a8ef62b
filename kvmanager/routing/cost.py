"""Which replica to compute a prompt on: the one where least is lost, in tokens of prefill.

``new = max(0, prompt - sum(credit[tier] * hits[tier]))``

``wait = active_prefill + new + decode_weight * decode_blocks``

``cost = wait + (work_weight - 1) * new + balance_weight * recent_prefill``

A token that can be reused saves ``credit`` tokens of prefill: all of one on the device, less where it must be loaded
first. *Wait* is what this prompt's first token waits for. Two more things are lost with a choice, which a prompt does
not feel and those after it do. Work that another replica has done already is done again, or its result is loaded into a
second device and drives other KV out: a replica busy for the share u of its time delays what comes later by
1 / (1 - u) for each second of work, and a displaced block costs its next user as much again, hence ``work_weight``. And
ties, of which a half idle server has many, add up to lasting differences unless something remembers them:
``recent_prefill`` is what a replica was sent lately, decayed, and breaks what is nearly a tie.

Where replicas have roles (`kvmanager.routing.roles`), a prompt to prefill waits for no decodes, which end there with
their first token, and what follows elsewhere is work of one replica, done once: ``new`` counts without its weight.

The load of a replica is what this router has sent there and not heard the end of; it counts from the moment of choice,
before any replica reports it, or a burst of equal prompts would herd to one. What is on its way to a device in that
manner counts as being there (`RoutingState.with_in_flight`). Ties go to the replica that was used least recently.
One thread.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp2

from kvmanager.index.locations import Tier
from kvmanager.routing.mirror import TierHits
from kvmanager.routing.roles import Phase
from kvmanager.segments.keys import BlockHash

STARTING_CREDITS = {Tier.DEVICE: 1.0, Tier.CPU: 0.75, Tier.REDIS: 0.5}
"""Until measured (`kvmanager.loading.load_rates`): then 1 - load time / recompute time of a token."""
WORK_WEIGHT = 6.0
BALANCE_WEIGHT = 0.1
"""Both found on the simulator's traces, one setting for all: docs/measured/routing.md."""
RECENT_HALF_LIFE_S = 60.0
MOST_IN_FLIGHT_S = 3600.0
"""After it a request whose end was never told stops counting, lest a replica be shunned forever."""

_NOTHING = TierHits(0, 0, 0)


@dataclass(slots=True)
class _SentPrompt:
    replica: str
    prefill_tokens: int
    decode_blocks: int
    since: float
    hashes: Sequence[BlockHash]


@dataclass(slots=True)
class _ReplicaLoad:
    prefill_tokens: int = 0
    decode_blocks: int = 0
    recent_tokens: float = 0.0
    recent_at: float = 0.0
    last_used: int = 0

    def recent(self, now: float) -> float:
        """Tokens sent here, each halved every `RECENT_HALF_LIFE_S`."""
        return self.recent_tokens * exp2(min(0.0, self.recent_at - now) / RECENT_HALF_LIFE_S)


class RoutingState:
    """The requests in flight from one router, and the ranking of replicas that follows from them."""

    def __init__(
        self,
        block_size: int,
        decode_weight: float = 1.0,
        blocks_per_segment: int = 1,
        work_weight: float = WORK_WEIGHT,
    ) -> None:
        """Take tokens per block, prefill tokens that one block of running decode weighs, blocks, and a weight."""
        self.credits = dict(STARTING_CREDITS)
        self.credits_of: Mapping[str, Mapping[Tier, float]] = {}
        """Of single replicas, as measured there; `credits` for other replicas and tiers."""
        self._block_size = block_size
        self._decode_weight = decode_weight
        self._work_weight = work_weight
        self._in_flight: dict[str, _SentPrompt] = {}
        self._coming = InFlightPrefixes(blocks_per_segment)
        self._loads: dict[str, _ReplicaLoad] = {}
        self._routed = 0

    def rank(
        self,
        replicas: Sequence[str],
        hits: Mapping[str, TierHits],
        prompt_tokens: int,
        now: float,
        phase: Phase = "",
    ) -> list[str]:
        """Return ``replicas``, cheapest first.

        ``hits``: what each would find of the prompt, in blocks; ``now``: seconds on a clock that does not jump.
        O(replicas log replicas), plus what has been in flight for too long.
        """
        self._forget_lost(now)

        def order(replica: str) -> tuple[float, int]:
            load = self._loads.get(replica)
            cost = self.cost(replica, hits.get(replica), prompt_tokens, now, phase)
            return cost, load.last_used if load else 0

        return sorted(replicas, key=order)

    def cost(self, replica: str, hits: TierHits | None, prompt_tokens: int, now: float, phase: Phase = "") -> float:
        """Return what is lost, in prefill tokens, when ``replica`` gets the prompt."""
        load = self._loads.get(replica)
        recent = load.recent(now) if load else 0.0
        cost = self.wait(replica, hits, prompt_tokens, phase) + BALANCE_WEIGHT * recent
        if phase == "decode":
            return cost
        return cost + (self._work_weight - 1.0) * self._new(replica, hits, prompt_tokens)

    def wait(self, replica: str, hits: TierHits | None, prompt_tokens: int, phase: Phase = "") -> float:
        """Return the work, in prefill tokens, before ``replica`` has the prompt's first token."""
        load = self._loads.get(replica)
        new = self._new(replica, hits, prompt_tokens)
        if load is None:
            return new
        decodes = 0.0 if phase == "prefill" else self._decode_weight * load.decode_blocks
        return load.prefill_tokens + new + decodes

    def with_in_flight(self, replica: str, hits: TierHits, hashes: Sequence[BlockHash]) -> TierHits:
        """Return ``hits`` with what requests in flight will leave on the device of ``replica`` counted as being there.

        A prompt that follows another of the same beginning waits behind it, and finds it computed. O(log segments).
        """
        device = self._coming.reach(replica, hashes)
        if device <= hits.device:
            return hits
        cpu = max(device, hits.device + hits.cpu)
        return TierHits(device, cpu - device, max(cpu, sum(hits)) - cpu)

    def route(
        self,
        request_id: str,
        replica: str,
        uncached_tokens: int,
        blocks: int,
        now: float,
        hashes: Sequence[BlockHash] = (),
    ) -> None:
        """Note that a request goes to ``replica``: tokens it must prefill there, blocks it decodes on, seconds.

        ``hashes`` are its prompt's, for `with_in_flight`. A request that is sent again, elsewhere or not, no longer
        counts where it was.
        """
        self.expect(request_id, replica, uncached_tokens, blocks, now, hashes)
        load = self._loads[replica]
        load.recent_tokens = load.recent(now) + uncached_tokens
        load.recent_at = now
        self._routed += 1
        load.last_used = self._routed

    def expect(
        self,
        request_id: str,
        replica: str,
        uncached_tokens: int,
        blocks: int,
        now: float,
        hashes: Sequence[BlockHash] = (),
    ) -> None:
        """Note that a request will probably go to ``replica``, as `route` does, but leave what was sent lately alone:
        a request may be expected several times, here and there, until it is routed or `finished`."""
        self.finished(request_id)
        self._in_flight[request_id] = _SentPrompt(replica, uncached_tokens, blocks, now, hashes)
        self._coming.add(replica, hashes)
        load = self._loads.setdefault(replica, _ReplicaLoad())
        load.prefill_tokens += uncached_tokens
        load.decode_blocks += blocks

    def first_token(self, request_id: str) -> None:
        """Note that a request's prefill is done. Unknown requests are ignored: their end may be told twice."""
        request = self._in_flight.get(request_id)
        if request is not None:
            self._loads[request.replica].prefill_tokens -= request.prefill_tokens
            request.prefill_tokens = 0

    def finished(self, request_id: str) -> None:
        """Note that a request has ended, in whatever way. Unknown requests are ignored."""
        self.first_token(request_id)
        request = self._in_flight.pop(request_id, None)
        if request is not None:
            self._loads[request.replica].decode_blocks -= request.decode_blocks
            self._coming.remove(request.replica, request.hashes)

    def replica_of(self, request_id: str) -> str | None:
        """Return where a request is, or is expected; None when it is not known."""
        request = self._in_flight.get(request_id)
        return None if request is None else request.replica

    def forget_replica(self, replica: str) -> None:
        """Note that a replica is gone, and with it its requests. O(requests in flight)."""
        self._in_flight = {name: request for name, request in self._in_flight.items() if request.replica != replica}
        self._loads.pop(replica, None)
        self._coming.forget(replica)

    def _new(self, replica: str, hits: TierHits | None, prompt_tokens: int) -> float:
        credits = {**self.credits, **self.credits_of.get(replica, {})}
        blocks = zip((Tier.DEVICE, Tier.CPU, Tier.REDIS), hits or _NOTHING, strict=True)
        saved = sum(credits[tier] * found for tier, found in blocks) * self._block_size
        return max(0.0, prompt_tokens - saved)

    def _forget_lost(self, now: float) -> None:
        while self._in_flight:
            request_id, oldest = next(iter(self._in_flight.items()))
            if now - oldest.since < MOST_IN_FLIGHT_S:
                return
            self.finished(request_id)


# What requests in flight will leave on the device of the replica that they were sent to. One thread.


class InFlightPrefixes:
    """Ends of segments per replica, counted, for several prompts may share them. What is added is removed once."""

    def __init__(self, blocks_per_segment: int) -> None:
        self._blocks_per_segment = blocks_per_segment
        self._ends: dict[str, Counter[BlockHash]] = {}

    def add(self, replica: str, hashes: Sequence[BlockHash]) -> None:
        """Note a prompt on its way to ``replica``. O(segments)."""
        self._ends.setdefault(replica, Counter()).update(self._cuts(hashes))

    def remove(self, replica: str, hashes: Sequence[BlockHash]) -> None:
        """Forget a prompt that was added, unless its replica has been forgotten since. O(segments)."""
        ends = self._ends.get(replica)
        if ends is None:
            return
        for block in self._cuts(hashes):
            ends[block] -= 1
            if ends[block] <= 0:
                del ends[block]

    def forget(self, replica: str) -> None:
        """Forget all prompts of a replica."""
        self._ends.pop(replica, None)

    def reach(self, replica: str, hashes: Sequence[BlockHash]) -> int:
        """Return how many leading blocks of a prompt are on their way, in whole segments. O(log segments)."""
        ends = self._ends.get(replica)
        return prefix_reach(hashes, self._blocks_per_segment, ends.__contains__) if ends else 0

    def _cuts(self, hashes: Sequence[BlockHash]) -> Sequence[BlockHash]:
        return hashes[self._blocks_per_segment - 1 :: self._blocks_per_segment]


def prefix_reach(hashes: Sequence[BlockHash], blocks_per_segment: int, holds: Callable[[BlockHash], bool]) -> int:
    """Return the largest n for which a held segment ends after the first n blocks of ``hashes`` (0 for none).

    ``holds`` tells whether a set of segments contains a key. The set must be closed: it contains the parent of each
    segment in it, and no segment crosses a multiple of ``blocks_per_segment`` (a cut). Then a cut is reached exactly if
    all cuts before it are, so the last one is found by bisection and only the blocks up to the next cut are tried one
    by one: O(log(len(hashes) / blocks_per_segment) + blocks_per_segment) look-ups.
    """
    low, high = 0, len(hashes) // blocks_per_segment
    while low < high:
        middle = (low + high + 1) // 2
        if holds(hashes[middle * blocks_per_segment - 1]):
            low = middle
        else:
            high = middle - 1
    reached = low * blocks_per_segment
    for end in range(min(len(hashes), reached + blocks_per_segment - 1), reached, -1):
        if holds(hashes[end - 1]):
            return end
    return reached
