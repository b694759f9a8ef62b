"""What `prefetch.py` measures: real manager, Redis, tiers and workers, and a replica without an engine."""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch

from deployments.cpu_tier import get_or_start_tier
from deployments.faulty_store import StoreFaults
from deployments.kv_port import PlannedLoad
from deployments.link_emulation import EmulatedLink
from deployments.manager_actor import KVManagerActor
from deployments.manager_client import MANAGER_ACTOR, SERVE_NAMESPACE
from deployments.port_waits import PortWaits
from deployments.prefetch_worker import PrefetchWorker
from deployments.redis_endpoint import RedisEndpoint, open_store, segment_prefix
from deployments.redis_server import EmbeddedRedis
from deployments.redis_tier import RedisTier, RedisTierConfig
from deployments.segment_copy import SegmentCopier
from deployments.tier_reader import TierReader
from kernels.paged.layout import LayoutKind, PagedLayout
from kvmanager.config import ManagerConfig
from kvmanager.keys import BlockHash
from kvmanager.locations import Tier
from kvmanager.segment_format import verify
from kvmanager.segments import SegmentSpan, split_segments
from kvmanager.server_secret import ServerSecret

FINGERPRINT = b"p" * 32
LAYERS = 24
LAYOUT = PagedLayout(LayoutKind.CPU_VEC, block_size=32, num_kv_heads=2, head_dim=64, dtype=torch.bfloat16)
TOKENS = 4000
BLOCKS = TOKENS // LAYOUT.block_size
SEGMENT_BLOCKS = 8
WORKERS = 4
"""Of each CPU tier; a load may be told to use fewer."""
STEP_ROUNDS = 30
PATIENCE_S = 60.0
MIB = 1 << 20


@dataclass(slots=True)
class Timing:
    """One load: seconds until the first segment was in the KV cache, and until the last; how many workers brought them,
    and whether one of them was so late that others were asked too."""

    first_s: float
    all_s: float
    workers: int
    asked_again: bool


def until(holds: Callable[[], Any], what: str) -> None:
    """Wait for a part that is on its way."""
    end = time.monotonic() + PATIENCE_S
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(f"waited in vain: {what}")
        time.sleep(0.01)


class PagedCache:
    """A replica's device pool without an engine, and the one sequence that goes into it."""

    def __init__(self) -> None:
        rng = torch.Generator().manual_seed(0)
        shape = (BLOCKS, *LAYOUT.block_shape)
        self.expected = [torch.randn(shape, generator=rng).to(LAYOUT.dtype) for _ in range(LAYERS)]
        self.layers = [torch.zeros(shape, dtype=LAYOUT.dtype) for _ in range(LAYERS)]
        self.copier = SegmentCopier(self.layers, LAYOUT, FINGERPRINT)
        self.copier.warm_up()
        draw = np.random.default_rng(0)
        self.hashes = [BlockHash(draw.bytes(32)) for _ in range(BLOCKS)]
        self.spans = split_segments(self.hashes, 0, BLOCKS, SEGMENT_BLOCKS, BLOCKS)

    def sealed(self) -> Iterator[tuple[SegmentSpan, np.ndarray[Any, Any]]]:
        """The segments of the expected cache."""
        source = SegmentCopier(self.expected, LAYOUT, FINGERPRINT)
        for span in self.spans:
            yield span, source.read(span, range(span.start_block, span.end_block))

    def write(self, load: PlannedLoad, sealed: memoryview) -> None:
        """Verify a segment and put it into its blocks, as `deployments.kv_transfer` does."""
        self.copier.write(sealed, load.key, load.num_blocks, 0, range(load.start_block, load.end_block))

    def check_and_clear(self) -> None:
        """Raise unless every byte is what it was; then nothing is."""
        for layer, expected in zip(self.layers, self.expected, strict=True):
            if not torch.equal(layer.view(torch.int16), expected.view(torch.int16)):
                raise AssertionError("the loaded KV differs from what was stored")
        self.clear()

    def clear(self) -> None:
        """Nothing is in the cache."""
        for layer in self.layers:
            layer.zero_()


class Application:
    """Manager, Redis tier and CPU tier with four prefetch workers over one link, and a replica's reader."""

    def __init__(self, server: EmbeddedRedis, link: EmulatedLink, cache: PagedCache) -> None:
        self.link = link
        self._cache = cache
        self._asked_again = False
        self._app = f"prefetch-{'emulated' if link else 'plain'}"
        self._node = ray.get_runtime_context().get_node_id()
        prefix = segment_prefix(self._app, FINGERPRINT)
        self._endpoint = RedisEndpoint(server.url, prefix, FINGERPRINT, PATIENCE_S, 0, ServerSecret(bytes(32)))
        store = open_store(self._endpoint)
        for span, buffer in cache.sealed():
            store.put(span.key, buffer.data)
        config = RedisTierConfig(self._app, server.url, "", self._app, 256 * MIB, 0, PATIENCE_S, StoreFaults(link=link))
        self.manager = (
            ray.remote(KVManagerActor)
            .options(
                name=f"SERVE_DEPLOYMENT_ACTOR::{self._app}::replica::v1::{MANAGER_ACTOR}",
                namespace=SERVE_NAMESPACE,
                num_cpus=0,
            )
            .remote(ManagerConfig(blocks_per_segment=SEGMENT_BLOCKS), with_redis=True)
        )
        self.ask("parts")
        self.tier = get_or_start_tier(self._app, self._node, 128 * MIB, WORKERS)
        self.redis_tier = ray.remote(RedisTier).options(num_cpus=0).remote(config, ServerSecret(bytes(32)))
        until(lambda: self._node in self.ask("parts")["cpu_tiers"], "the CPU tier registers")
        until(self._ready, "Redis is indexed and the workers have started")
        self._reader = TierReader(
            self._app, "replica", self._node, self._degraded, self._wrong, PortWaits(),
            {Tier.CPU.value: PATIENCE_S, Tier.REDIS.value: PATIENCE_S},
        )  # fmt: skip

    def ask(self, method: str, *args: Any) -> Any:
        """The manager's answer."""
        return ray.get(getattr(self.manager, method).remote(*args), timeout=PATIENCE_S)

    def ask_tier(self, method: str, *args: Any) -> Any:
        """The CPU tier's answer."""
        return ray.get(getattr(self.tier, method).remote(*args), timeout=PATIENCE_S)

    def load(self, workers: int | None) -> Timing:
        """One load of the whole prefix; then the CPU tier is emptied."""
        self.ask_tier("fix_prefetch_workers", workers)
        before = self.ask_tier("stats")["loads_by_workers"]
        self._register()
        lease_id, planned, *_ = self.ask("plan", "replica", self._node, self._cache.hashes)
        loads = [PlannedLoad(*segment) for segment in planned]
        if [load.tier for load in loads] != [Tier.REDIS.value] * len(self._cache.spans):
            raise RuntimeError(f"the plan is not to load everything from Redis: {loads}")
        began = time.perf_counter()
        first = 0.0
        for load, sealed in zip(loads, self._reader.read(loads, time.monotonic() + PATIENCE_S), strict=True):
            if sealed is None:
                raise RuntimeError("a segment did not come")
            self._cache.write(load, sealed)
            first = first or time.perf_counter() - began
        whole = time.perf_counter() - began
        del sealed
        self.ask("release", [lease_id])
        after = self.ask_tier("stats")["loads_by_workers"]
        used = max(number for number, count in after.items() if count != before.get(number, 0))
        self._cache.check_and_clear()
        self._empty_cpu_tier()
        asked_again, self._asked_again = self._asked_again, False
        return Timing(first, whole, used, asked_again)

    def steps(self) -> dict[str, float]:
        """Median seconds of each step that a whole segment goes through, alone and in this process."""
        span = self._cache.spans[0]
        load = PlannedLoad(span.key, span.start_block, span.num_blocks, Tier.REDIS.value, "", 0)
        transport: Any = PrefetchWorker(self._endpoint)._store._store._inner  # with a worker's memory settings
        raw = transport.get(span.key)
        assert raw is not None
        sealed = np.frombuffer(raw, np.uint8)
        ref = ray.put(sealed)
        steps: dict[str, Callable[[], Any]] = {
            "Redis to worker": lambda: transport.get(span.key),
            "verify (twice)": lambda: verify(raw, key=span.key, fingerprint=FINGERPRINT),
            "into the object store": lambda: ray.put(sealed),
            "out of it": lambda: ray.get(ref),
            "verify, into the KV cache": lambda: self._cache.write(load, ray.get(ref).data),
        }
        medians = {name: statistics.median(_timed(step) for _ in range(STEP_ROUNDS)) for name, step in steps.items()}
        self._cache.clear()
        return medians

    def close(self) -> None:
        """End what was started."""
        actors: list[Any] = [self.redis_tier, self.tier, self.manager]
        for actor in actors:
            ray.kill(actor)

    def _ready(self) -> bool:
        self._register()
        redis = self.ask("parts")["redis"]
        return redis["state"] == "ok" and not redis["indexing"] and self.ask_tier("stats")["workers"] == WORKERS

    def _empty_cpu_tier(self) -> None:
        until(lambda: self.ask_tier("stats")["pulls_in_flight"] == 0, "nothing is on its way")
        until(lambda: self.ask("stats")["reservations"] == 0, "nothing is held")
        self.ask("clear", ["cpu"], PATIENCE_S)

    def _register(self) -> None:
        """Also again: a replica that is silent while the others have their turn is forgotten."""
        self.ask("register_replica", "replica", 0, self._node, [], FINGERPRINT)

    def _degraded(self, what: str) -> None:
        if what == "redis_asked_again":
            self._asked_again = True
            return
        raise RuntimeError(f"a load was degraded: {what}")

    def _wrong(self, what: str, load: PlannedLoad) -> None:
        raise RuntimeError(f"{what}: segment at block {load.start_block}")


@contextmanager
def running() -> Iterator[EmbeddedRedis]:
    """A Ray and a redis-server of this program's own."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(
        address="local", namespace="serve", include_dashboard=False, num_cpus=8, object_store_memory=512 * MIB,
        log_to_driver=False, _system_config={"automatic_object_spilling_enabled": False},
    )  # fmt: skip
    try:
        with tempfile.TemporaryDirectory() as folder:
            server = EmbeddedRedis(Path(folder), 512 * MIB)
            server.start()
            try:
                yield server
            finally:
                server.stop()
    finally:
        ray.shutdown()


def _timed(step: Callable[[], Any]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began
