"""Which replica shall compute a prompt: the one with the least work left, in tokens.

``cost = active_prefill + max(0, prompt - sum(credit[tier] * hits[tier])) + decode_weight * decode_blocks``

A token that can be reused saves ``credit`` tokens of prefill: all of one on the device, less where it must be loaded
first. The load of a replica is what this router has sent there and not heard the end of; it counts from the moment of
routing, before any replica reports it, or a burst of equal prompts would herd to one. Ties go to the replica that was
used least recently. One thread.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvmanager.locations import Tier
from kvmanager.mirror import TierHits

STARTING_CREDITS = {Tier.DEVICE: 1.0, Tier.CPU: 0.75, Tier.REDIS: 0.5}
"""Until measured: then 1 - load time / recompute time of a token."""

_IDLE = (0, 0)


@dataclass(slots=True)
class _InFlight:
    replica: str
    prefill_tokens: int
    decode_blocks: int
    since: float


class RoutingState:
    """The requests in flight from one router, and the ranking of replicas that follows from them."""

    def __init__(self, block_size: int, decode_weight: float = 1.0, max_in_flight_s: float = 3600.0) -> None:
        """Take tokens per block, prefill tokens that one block of running decode weighs, and seconds.

        After ``max_in_flight_s`` a request whose end was never told stops counting, lest a replica be shunned forever.
        """
        self.credits = dict(STARTING_CREDITS)
        self._block_size = block_size
        self._decode_weight = decode_weight
        self._max_in_flight_s = max_in_flight_s
        self._in_flight: dict[str, _InFlight] = {}
        self._load: dict[str, tuple[int, int]] = {}
        self._last_used: dict[str, int] = {}
        self._routed = 0

    def rank(self, replicas: Sequence[str], hits: Mapping[str, TierHits], prompt_tokens: int, now: float) -> list[str]:
        """Return ``replicas``, cheapest first.

        ``hits``: what each would find of the prompt, in blocks; ``now``: seconds on a clock that does not jump.
        O(replicas log replicas), plus what has been in flight for too long.
        """
        self._forget_lost(now)

        def order(replica: str) -> tuple[float, int]:
            return self.cost(replica, hits.get(replica), prompt_tokens), self._last_used.get(replica, 0)

        return sorted(replicas, key=order)

    def cost(self, replica: str, hits: TierHits | None, prompt_tokens: int) -> float:
        """Return the work, in prefill tokens, that is left when ``replica`` gets the prompt."""
        prefill_tokens, decode_blocks = self._load.get(replica, _IDLE)
        saved = 0.0
        if hits is not None:
            blocks = zip((Tier.DEVICE, Tier.CPU, Tier.REDIS), hits, strict=True)
            saved = sum(self.credits[tier] * found for tier, found in blocks) * self._block_size
        return prefill_tokens + max(0.0, prompt_tokens - saved) + self._decode_weight * decode_blocks

    def route(self, request_id: str, replica: str, uncached_tokens: int, blocks: int, now: float) -> None:
        """Note that a request goes to ``replica``: tokens it must prefill there, blocks it decodes on, seconds.

        A request that is sent again, elsewhere or not, no longer counts where it was.
        """
        self.finished(request_id)
        self._in_flight[request_id] = _InFlight(replica, uncached_tokens, blocks, now)
        self._add(replica, uncached_tokens, blocks)
        self._routed += 1
        self._last_used[replica] = self._routed

    def first_token(self, request_id: str) -> None:
        """Note that a request's prefill is done. Unknown requests are ignored: their end may be told twice."""
        request = self._in_flight.get(request_id)
        if request is not None:
            self._add(request.replica, -request.prefill_tokens, 0)
            request.prefill_tokens = 0

    def finished(self, request_id: str) -> None:
        """Note that a request has ended, in whatever way. Unknown requests are ignored."""
        request = self._in_flight.pop(request_id, None)
        if request is not None:
            self._add(request.replica, -request.prefill_tokens, -request.decode_blocks)

    def forget_replica(self, replica: str) -> None:
        """Note that a replica is gone, and with it its requests. O(requests in flight)."""
        self._in_flight = {name: request for name, request in self._in_flight.items() if request.replica != replica}
        self._load.pop(replica, None)
        self._last_used.pop(replica, None)

    def _add(self, replica: str, prefill_tokens: int, decode_blocks: int) -> None:
        prefill, decode = self._load.get(replica, _IDLE)
        self._load[replica] = (prefill + prefill_tokens, decode + decode_blocks)

    def _forget_lost(self, now: float) -> None:
        while self._in_flight:
            request_id, oldest = next(iter(self._in_flight.items()))
            if now - oldest.since < self._max_in_flight_s:
                return
            self.finished(request_id)
