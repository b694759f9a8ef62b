"""A Redis tier whose store is disturbed in every process that opens it: calls fail, reads are damaged, links are slow.

The disturbance travels as the endpoint does, from the tier over the manager and the CPU tiers to the prefetch workers,
and outlives them. It lies right above the transport, so that a damaged segment meets the same checks as one that Redis
has damaged.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Protocol

from deployments.redis_tier.config import RedisTierConfig
from deployments.segment_store.base import OwnBuffer, SegmentStore, StoredHeader, StoreUnavailableError
from deployments.segment_store.endpoint import RedisEndpoint
from kvmanager.segments.format import Buffer


class Disturbance(Protocol):
    """What lies before Redis. Can be pickled."""

    def before(self, store: SegmentStore, deadline_s: float) -> SegmentStore:
        """The store with the disturbance; no call of it may take longer than `deadline_s`."""
        ...


@dataclass(frozen=True, slots=True)
class DisturbedEndpoint(RedisEndpoint):
    """See the module's docstring."""

    disturbance: Disturbance = field(kw_only=True)

    def transport(self) -> SegmentStore:
        """See `RedisEndpoint.transport`."""
        return self.disturbance.before(RedisEndpoint.transport(self), self.deadline_s)


@dataclass(frozen=True, slots=True)
class DisturbedRedisConfig(RedisTierConfig):
    """A tier's configuration with which its endpoints are disturbed."""

    disturbance: Disturbance = field(kw_only=True)

    def endpoint(self, *args: Any) -> RedisEndpoint:
        """See `RedisTierConfig.endpoint`."""
        return DisturbedEndpoint(**_fields(RedisTierConfig.endpoint(self, *args)), disturbance=self.disturbance)


def disturbed(config: RedisTierConfig, disturbance: Disturbance) -> DisturbedRedisConfig:
    """The same configuration with a disturbance."""
    return DisturbedRedisConfig(**_fields(config), disturbance=disturbance)


@dataclass(frozen=True, slots=True)
class StoreFaults:
    """How a store misbehaves: shares (0..1) of calls that fail, and of reads that are damaged, in how many bytes."""

    error_share: float = 0.0
    corrupt_share: float = 0.0
    damaged_bytes: int = 1
    """One is the hardest to find; an answer shows many where no check finds them."""

    def before(self, store: SegmentStore, deadline_s: float) -> SegmentStore:
        """See `Disturbance.before`."""
        return FaultyStore(store, self, random.Random())


class FaultyStore:
    """Any `SegmentStore` with faults. Listing headers never fails: the index can always be built."""

    def __init__(self, inner: SegmentStore, faults: StoreFaults, rng: random.Random) -> None:
        self._inner = inner
        self._faults = faults
        self._rng = rng
        self._lock = threading.Lock()

    def get(self, key: bytes) -> OwnBuffer | None:
        """Damages some bytes, wherever they are."""
        self._perhaps_fail()
        sealed = self._inner.get(key)
        if sealed and self._drawn(self._faults.corrupt_share):
            for _ in range(self._faults.damaged_bytes):
                sealed[int(self._draw() * len(sealed))] ^= 0xFF
        return sealed

    def put(self, key: bytes, header: Buffer, body: Buffer) -> None:
        """See `SegmentStore.put`."""
        self._perhaps_fail()
        self._inner.put(key, header, body)

    def delete(self, keys: Sequence[bytes]) -> int:
        """See `SegmentStore.delete`."""
        if keys:
            self._perhaps_fail()
        return self._inner.delete(keys)

    def headers(self) -> Iterator[list[StoredHeader]]:
        """See `SegmentStore.headers`."""
        return self._inner.headers()

    def _perhaps_fail(self) -> None:
        if self._drawn(self._faults.error_share):
            raise StoreUnavailableError("Redis cannot be reached (injected fault)")

    def _drawn(self, share: float) -> bool:
        return bool(share) and self._draw() < share

    def _draw(self) -> float:
        with self._lock:
            return self._rng.random()


def _fields(of: Any) -> dict[str, Any]:
    return {each.name: getattr(of, each.name) for each in fields(of)}
