"""Reads planned segments from the CPU tiers, and from Redis by way of this node's CPU tier.

All tiers are asked at once (for more than `WINDOW_BYTES` from Redis: again and again, so that the object store need not
hold it all, and one by one where segments are as large as that); then the segments are handed on in order, as they
arrive. The first that does not come ends the read, for the tokens after it would have to be recomputed anyway. A tier
that does not answer several times in a row is not asked for a while (`kvmanager.circuit_breaker`), so that not every
request waits for it.

A segment whose prefetch worker has died, or is late while others have brought what comes after it, is asked of another
worker, once in a read.

Used from the load threads, several at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import ray

from deployments.cpu_tier.actor import tier_name
from deployments.port.calls import LockedBreaker, PortWaits
from deployments.protocol.actor_finder import SEARCH_S, ActorFinder
from deployments.protocol.manager_client import SERVE_NAMESPACE
from deployments.segment_store.segment_tail import without_tail
from kvmanager.index.locations import Tier
from kvmanager.loading.prefix_load import segment_wait_s
from kvmanager.moves.plan import PlannedLoad

WINDOW_BYTES = 48 * 1024**2
"""From Redis, asked for in one call. Two calls are under way at a time: so a load fits what a tier's workers may have
under way (`kvmanager.segments.sizes.MOST_BYTES_IN_FLIGHT`), however long it is. A segment that is larger is a call of
its own, and under way alone."""
LATE_S = 0.25
"""A wait this long, while later segments are there, is the worker's fault and not Redis's: they come about evenly."""


@dataclass(slots=True)
class TierCall:
    """A tier was asked for segments: `answer` is to come (None: not asked, or none), `refs` when it has come."""

    node_id: str
    loads: Sequence[PlannedLoad]
    handle: Any = None
    answer: Any = None
    refs: dict[bytes, Any] | None = None
    asked_again: bool = False

    @property
    def open(self) -> bool:
        """Whether the tier has not answered yet."""
        return self.refs is None and self.answer is not None


class _Place(NamedTuple):
    """The tier to ask for a segment, and the index of the batch."""

    tier: str
    node_id: str
    window: int


class TierReader:
    """See the module's docstring.

    `count` notes a degradation by its name; `report(what, load)` tells the manager of a segment that is "lost" or a
    "bad_segment"; `longest_wait_s` is, by tier, the longest wait for the next segment
    (`kvmanager.loading.prefix_load.segment_wait_s` adds for its bytes).
    """

    def __init__(
        self,
        app_name: str,
        replica: str,
        node_id: str,
        count: Callable[[str], None],
        report: Callable[[str, PlannedLoad], None],
        waits: PortWaits,
        longest_wait_s: Mapping[str, float],
    ) -> None:
        self._app_name = app_name
        self._replica = replica
        self._node_id = node_id
        self._count = count
        self._report = report
        self._waits = waits
        self._longest_wait_s = longest_wait_s
        self._finders: dict[str, ActorFinder] = {}
        self._circuits: dict[str, LockedBreaker] = {}
        self._lock = threading.Lock()

    def read(self, loads: Sequence[PlannedLoad], deadline: float) -> Iterator[memoryview | None]:
        """See `KVPort.fetch`."""
        places = self._places(loads)
        distinct = list(dict.fromkeys(places))
        ahead = int(all(load.memory_bytes <= WINDOW_BYTES for load in loads if load.tier == Tier.REDIS.value))
        calls: dict[_Place, TierCall] = {}
        try:
            for load, place in zip(loads, places, strict=True):
                for near in distinct:
                    if near not in calls and near.window <= place.window + ahead:
                        there = [each for each, at in zip(loads, places, strict=True) if at == near]
                        calls[near] = self._ask(near, there)
                with self._waits.segment.labels(load.tier).time():
                    wait_ends = time.monotonic() + segment_wait_s(self._longest_wait_s[load.tier], load.nbytes)
                    sealed = self._take(load, calls[place], min(deadline, wait_ends))
                yield sealed
                if sealed is None:
                    return
        finally:
            for call in calls.values():
                if call.open:  # its answer is no longer wanted
                    self._circuit(call.node_id).abandoned()

    def circuits(self) -> dict[str, str]:
        """The state of each CPU tier's circuit breaker, by node."""
        with self._lock:
            return {node: breaker.state.value for node, breaker in self._circuits.items()}

    def _places(self, loads: Sequence[PlannedLoad]) -> list[_Place]:
        """Return the tier and the batch of each segment."""
        places, window, window_bytes = [], 0, 0
        for load in loads:
            if load.tier == Tier.CPU.value:
                places.append(_Place(load.tier, load.holder, 0))
                continue
            if window_bytes and window_bytes + load.memory_bytes > WINDOW_BYTES:
                window, window_bytes = window + 1, 0
            window_bytes += load.memory_bytes
            places.append(_Place(load.tier, self._node_id, window))
        return places

    def _ask(self, place: _Place, loads: Sequence[PlannedLoad]) -> TierCall:
        """Ask a node's tier for segments, without waiting."""
        node_id = place.node_id
        if not self._circuit(node_id).allows(time.monotonic()):
            self._count("fetch_not_asked")
            return TierCall(node_id, loads)
        try:
            handle = self._finder(node_id).wait(SEARCH_S)
        except Exception:  # none of that name, or Ray's directory does not answer
            self._circuit(node_id).failed(time.monotonic())
            self._count("fetch_tier_gone")
            return TierCall(node_id, loads)
        if place.tier == Tier.CPU.value:
            return TierCall(node_id, loads, handle, handle.fetch.remote([load.key for load in loads]))
        return TierCall(node_id, loads, handle, handle.prefetch.remote(self._replica, _wanted(loads)))

    def _take(self, load: PlannedLoad, call: TierCall, deadline: float) -> memoryview | None:
        """Wait for one segment; what is wrong with it, or with its tier, is counted and reported."""
        in_redis = load.tier == Tier.REDIS.value
        try:
            refs = self._answer(call, deadline)
            if refs is None:
                return None  # its tier did not answer, which says nothing about the segment
            if refs[load.key] is None:
                found: Any = "not_asked" if in_redis else "missing"
            else:
                found = self._get(load, call, refs, deadline)
        except ray.exceptions.GetTimeoutError:
            self._count("redis_late" if in_redis else "fetch_late")
            return None
        except ray.exceptions.RayError:
            found = "worker_lost" if in_redis else "lost"
        if not isinstance(found, str):
            return without_tail(memoryview(found))
        self._count(f"{'redis' if in_redis else 'fetch'}_{found}")
        if found in ("missing", "lost"):
            self._report("lost", load)
        elif found.startswith(("mismatch", "wrong_type")):
            self._report("bad_segment", load)
        return None

    def _get(self, load: PlannedLoad, call: TierCall, refs: dict[bytes, Any], deadline: float) -> Any:
        """Return the object of a reference, without keeping it for longer. Raises RayError, GetTimeoutError."""
        may_ask_again = load.tier == Tier.REDIS.value and not call.asked_again
        while True:
            now = time.monotonic()
            try:
                until = min(deadline, now + LATE_S) if may_ask_again else deadline
                found = ray.get(refs[load.key], timeout=max(0.0, until - now))
                del refs[load.key]
                return found
            except ray.exceptions.GetTimeoutError:
                if time.monotonic() >= deadline:
                    raise
                if not self._later_ones_have_come(load, call, refs):
                    continue
            except ray.exceptions.RayActorError:  # the worker has died
                if not may_ask_again:
                    raise
            may_ask_again = False
            call.asked_again = True
            self._ask_again(load, call, refs, deadline)

    def _later_ones_have_come(self, load: PlannedLoad, call: TierCall, refs: dict[bytes, Any]) -> bool:
        later = [refs[each.key] for each in _from(load, call.loads)[1:]]
        there, _ = ray.wait([ref for ref in later if ref is not None], timeout=0, fetch_local=False)
        return bool(there)

    def _ask_again(self, load: PlannedLoad, call: TierCall, refs: dict[bytes, Any], deadline: float) -> None:
        """Have the tier ask other workers for what the worker of this segment has not brought."""
        self._count("redis_asked_again")
        rest = _from(load, call.loads)
        answer = call.handle.prefetch.remote(self._replica, _wanted(rest), load.key)
        found = ray.get(answer, timeout=max(0.0, deadline - time.monotonic()))
        refs.update({each.key: ref for each, ref in zip(rest, found, strict=True) if ref is not None})

    def _answer(self, call: TierCall, deadline: float) -> dict[bytes, Any] | None:
        """The references that a tier has answered; None when it does not. Raises GetTimeoutError."""
        if call.open:
            circuit = self._circuit(call.node_id)
            try:
                found = ray.get(call.answer, timeout=max(0.0, deadline - time.monotonic()))
            except ray.exceptions.GetTimeoutError:
                circuit.failed(time.monotonic())
                call.answer = None
                raise
            except ray.exceptions.RayError as error:
                gone = isinstance(error, ray.exceptions.RayActorError)
                if gone:
                    self._finder(call.node_id).lost(call.handle)
                circuit.failed(time.monotonic())
                self._count("fetch_tier_gone" if gone else "fetch_failed")
                call.answer = None
                return None
            circuit.succeeded()
            call.refs = {load.key: ref for load, ref in zip(call.loads, found, strict=True)}
        return call.refs

    def _finder(self, node_id: str) -> ActorFinder:
        """Of the tier of any node."""
        name = tier_name(self._app_name, node_id)
        with self._lock:
            if node_id not in self._finders:
                self._finders[node_id] = ActorFinder(lambda: ray.get_actor(name, namespace=SERVE_NAMESPACE))
            return self._finders[node_id]

    def _circuit(self, node_id: str) -> LockedBreaker:
        with self._lock:
            return self._circuits.setdefault(node_id, LockedBreaker())


def _from(load: PlannedLoad, loads: Sequence[PlannedLoad]) -> Sequence[PlannedLoad]:
    """A load and those that are handed on after it, which may begin before it."""
    return loads[loads.index(load) :]


def _wanted(loads: Sequence[PlannedLoad]) -> list[tuple[bytes, int]]:
    """As `CPUTier.prefetch` takes them."""
    return [(load.key, load.memory_bytes) for load in loads]
