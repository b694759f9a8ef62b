"""Reads planned segments from the CPU tiers, and from Redis by way of this node's CPU tier.

All tiers are asked at once; then the segments are handed on in order, as they arrive. The first that does not come ends
the read, for the tokens after it would have to be recomputed anyway. A tier that does not answer several times in a
row is not asked for a while (`kvmanager.circuit_breaker`), so that not every request waits for it.

Used from the load threads, several at once.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray

from deployments.cpu_tier import tier_name
from deployments.kv_port import PlannedLoad
from deployments.locked_breaker import LockedBreaker
from deployments.manager_client import SERVE_NAMESPACE
from deployments.port_waits import PortWaits
from kvmanager.locations import Tier


@dataclass(slots=True)
class TierCall:
    """A tier was asked for segments: `answer` is to come (None: not asked, or none), `refs` when it has come."""

    node_id: str
    keys: list[bytes]
    answer: Any
    refs: dict[bytes, Any] | None = None


class TierReader:
    """See the module's docstring.

    `count` notes a degradation by its name; `report(what, load)` tells the manager of a segment that is "lost" or a
    "bad_segment"; `patience_s` is, by tier, the longest wait for the next segment.
    """

    def __init__(
        self,
        app_name: str,
        replica: str,
        node_id: str,
        count: Callable[[str], None],
        report: Callable[[str, PlannedLoad], None],
        waits: PortWaits,
        patience_s: Mapping[str, float],
    ) -> None:
        self._app_name = app_name
        self._replica = replica
        self._node_id = node_id
        self._count = count
        self._report = report
        self._waits = waits
        self._patience_s = patience_s
        self._handles: dict[str, Any] = {}
        self._circuits: dict[str, LockedBreaker] = {}
        self._lock = threading.Lock()

    def read(self, loads: Sequence[PlannedLoad], deadline: float) -> Iterator[memoryview | None]:
        """See `KVPort.fetch`."""
        places = [(load.tier, self._asked_node(load)) for load in loads]
        calls = {
            place: self._ask(*place, [load for load, at in zip(loads, places, strict=True) if at == place])
            for place in dict.fromkeys(places)
        }
        for load, place in zip(loads, places, strict=True):
            with self._waits.segment.labels(load.tier).time():
                patience_ends = time.monotonic() + self._patience_s[load.tier]
                sealed = self._take(load, calls[place], min(deadline, patience_ends))
            yield sealed
            if sealed is None:
                return

    def circuits(self) -> dict[str, str]:
        """The state of each CPU tier's circuit breaker, by node."""
        with self._lock:
            return {node: breaker.state.value for node, breaker in self._circuits.items()}

    def _asked_node(self, load: PlannedLoad) -> str:
        return load.holder if load.tier == Tier.CPU.value else self._node_id

    def _ask(self, tier: str, node_id: str, loads: Sequence[PlannedLoad]) -> TierCall:
        """Ask a node's tier for segments, without waiting."""
        keys = [load.key for load in loads]
        if not self._circuit(node_id).allows(time.monotonic()):
            self._count("fetch_not_asked")
            return TierCall(node_id, keys, None)
        try:
            handle = self._handle(node_id)
        except ValueError:
            self._circuit(node_id).failed(time.monotonic())
            self._count("fetch_tier_gone")
            return TierCall(node_id, keys, None)
        if tier == Tier.CPU.value:
            return TierCall(node_id, keys, handle.fetch.remote(keys))
        wanted = [(load.key, load.nbytes) for load in loads]
        return TierCall(node_id, keys, handle.promote.remote(self._replica, wanted))

    def _take(self, load: PlannedLoad, call: TierCall, deadline: float) -> memoryview | None:
        """Wait for one segment; what is wrong with it, or with its tier, is counted and reported."""
        in_redis = load.tier == Tier.REDIS.value
        try:
            refs = self._answer(call, deadline)
            if refs is None:
                return None  # its tier did not answer, which says nothing about the segment
            ref = refs[load.key]
            if ref is None:
                found: Any = "not_asked" if in_redis else "missing"
            else:
                found = ray.get(ref, timeout=max(0.0, deadline - time.monotonic()))
        except ray.exceptions.GetTimeoutError:
            self._count("redis_late" if in_redis else "fetch_late")
            return None
        except ray.exceptions.RayError:
            found = "worker_lost" if in_redis else "lost"
        if not isinstance(found, str):
            return memoryview(found)
        self._count(f"{'redis' if in_redis else 'fetch'}_{found}")
        if found in ("missing", "lost"):
            self._report("lost", load)
        elif found.startswith(("mismatch", "wrong_type")):
            self._report("bad_segment", load)
        return None

    def _answer(self, call: TierCall, deadline: float) -> dict[bytes, Any] | None:
        """The references that a tier has answered; None when it does not. Raises GetTimeoutError."""
        if call.refs is None and call.answer is not None:
            circuit = self._circuit(call.node_id)
            try:
                found = ray.get(call.answer, timeout=max(0.0, deadline - time.monotonic()))
            except ray.exceptions.GetTimeoutError:
                circuit.failed(time.monotonic())
                raise
            except ray.exceptions.RayError as error:
                gone = isinstance(error, ray.exceptions.RayActorError)
                if gone:
                    self._handles.pop(call.node_id, None)
                circuit.failed(time.monotonic())
                self._count("fetch_tier_gone" if gone else "fetch_failed")
                call.answer = None
                return None
            circuit.succeeded()
            call.refs = dict(zip(call.keys, found, strict=True))
        return call.refs

    def _handle(self, node_id: str) -> Any:
        """The tier of any node. Raises ValueError when there is none."""
        if node_id not in self._handles:
            self._handles[node_id] = ray.get_actor(tier_name(self._app_name, node_id), namespace=SERVE_NAMESPACE)
        return self._handles[node_id]

    def _circuit(self, node_id: str) -> LockedBreaker:
        with self._lock:
            return self._circuits.setdefault(node_id, LockedBreaker())
