"""A manager actor and a CPU tier in a real Ray, without engines, and segments to put into them."""

from __future__ import annotations

import itertools
import random
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import ray
from ray import cloudpickle

from deployments.cpu_tier.actor import TierTimes, get_or_start_tier
from deployments.manager import tier_registry
from deployments.manager.actor import KVManagerActor
from deployments.protocol.engine_facts import EngineFacts
from deployments.protocol.kv_port import OfferedBlocks
from kvmanager.config import ManagerConfig
from kvmanager.moves.plan import PlanQuery
from kvmanager.segments.format import SegmentHeader, seal, sealed_bytes
from kvmanager.segments.keys import BlockHash
from kvmanager.segments.spans import SegmentSpan, split_segments
from load_tests.harness.memory_port import made_up_hashes
from load_tests.harness.patience import patience
from load_tests.harness.tiers import start_manager

cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import this module

SEGMENT_BLOCKS = 4
FINGERPRINT = b"f" * 32
SHAPE = (1, 2, 32 * SEGMENT_BLOCKS, 4, 146)
SEGMENT_BYTES = sealed_bytes(SHAPE, "bfloat16", SEGMENT_BLOCKS)
"""300 kB: more than Ray keeps outside its shared memory."""
PATIENCE_S = 60.0
TIMES = TierTimes(heartbeat_s=0.1, first_heartbeat_s=0.05)
SIZES = [SEGMENT_BYTES] * SEGMENT_BLOCKS
"""Of segments of one block and more, for an offer."""
_hashes: dict[bytes, list[BlockHash]] = {}
"""By the key of each segment of a `sequence`, all of its blocks."""
_numbers = itertools.count()


def sequence(seed: int, segments: int) -> tuple[list[BlockHash], list[SegmentSpan]]:
    """The block hashes of a prompt, and its segments."""
    draw = random.Random(seed)
    hashes = [BlockHash(draw.randbytes(32)) for _ in range(segments * SEGMENT_BLOCKS)]
    spans = split_segments(hashes, 0, len(hashes), SEGMENT_BLOCKS, len(hashes))
    _hashes.update((span.key, hashes) for span in spans)
    return hashes, spans


def offered(spans: Sequence[SegmentSpan]) -> OfferedBlocks:
    """Segments of a `sequence`, as a replica offers them that has computed them."""
    first, last = spans[0], spans[-1]
    hashes = _hashes[last.key][: last.end_block]
    return OfferedBlocks(hashes, first.start_block, last.end_block, len(hashes), first.tenant)


def sealed(spans: Sequence[SegmentSpan]) -> list[np.ndarray[Any, np.dtype[np.uint8]]]:
    """The sealed bytes of each segment, different ones."""
    return [_sealed(span) for span in spans]


def _sealed(span: SegmentSpan) -> np.ndarray[Any, np.dtype[np.uint8]]:
    buffer = np.full(SEGMENT_BYTES, span.key[0], np.uint8)
    seal(buffer.data, SegmentHeader.raw(span, made_up_hashes(span), FINGERPRINT, SHAPE, "bfloat16"))
    return buffer


def until(holds: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + patience(PATIENCE_S)
    while not holds():
        assert time.monotonic() < deadline, f"waited in vain for: {what}"
        time.sleep(0.02)


class PatientManager(KVManagerActor):
    """Takes no tier for late because the machine stands still."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        tier_registry.ANSWER_S = PATIENCE_S
        super().__init__(*args, **kwargs)


class KVCluster:
    """An application of its own: one manager, one tier with room for `segments`, one replica that only has a name."""

    def __init__(
        self, segments: int = 20, with_redis: bool = False, prefetch_workers: int = 0, lease_s: float = 3600.0
    ) -> None:
        """Without `lease_s` nothing ends by itself."""
        self._with_redis = with_redis
        self._lease_s = lease_s
        self.app = f"app{next(_numbers)}"
        self.node = ray.get_runtime_context().get_node_id()
        self.budget_bytes = segments * SEGMENT_BYTES
        self.start_manager()
        self.tier = get_or_start_tier(self.app, self.node, self.budget_bytes, prefetch_workers, TIMES)
        self.wait_for_tier()
        self.register_replica()

    def start_manager(self) -> None:
        """Named as Serve names a deployment-scoped actor."""
        config = ManagerConfig(
            blocks_per_segment=SEGMENT_BLOCKS, lease_s=self._lease_s, save_s=3600.0, eviction_policy="lru"
        )

        def started() -> bool:
            try:
                self.manager = start_manager(self.app, config, self._with_redis, PatientManager)
            except ValueError:  # Ray has not noticed yet that the name is free
                return False
            return True

        until(started, "the name of the manager is free")
        self.ask("api", "parts")

    def ask(self, method: str, *args: Any) -> Any:
        return ray.get(getattr(self.manager, method).remote(*args), timeout=patience(PATIENCE_S))

    def ask_tier(self, method: str, *args: Any) -> Any:
        return ray.get(getattr(self.tier, method).remote(*args), timeout=patience(PATIENCE_S))

    def wait_for_tier(self) -> None:
        until(lambda: self.node in self.ask("api", "parts")["cpu_tiers"], "the tier is registered")

    def register_replica(self) -> None:
        self.ask("register_replica", "replica", 0, self.node, [], EngineFacts(FINGERPRINT))

    def stats(self) -> dict[str, Any]:
        """The manager's books; asking keeps the replica from being forgotten with its leases and saves."""
        self.ask("take_directives", "replica", 0.0)
        return self.ask("api", "stats")

    def save(self, spans: Sequence[SegmentSpan]) -> int:
        """Offer and put; returns how many segments the tier kept."""
        _, granted = self.ask("offer", "replica", self.node, offered(spans), SIZES)
        return self.ask_tier("put", granted, *sealed(granted)) if granted else 0

    def planned(self, hashes: Sequence[BlockHash]) -> list[bytes]:
        """Keys of the segments that a plan would load; the lease is given back at once."""
        self.register_replica()
        plan = self.ask("plan", "replica", self.node, PlanQuery(hashes))
        self.ask("release", [plan.lease_id])
        return [load.key for load in plan.segments]

    def close(self) -> None:
        ray.kill(self.tier, no_restart=True)
        ray.kill(self.manager)
