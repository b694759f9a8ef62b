"""What `prefetch.py` measures: real manager, Redis, tiers and workers, and a replica without an engine."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch

from deployments.cpu_tier.prefetch_worker import PrefetchWorker
from deployments.port.port_waits import PortWaits
from deployments.port.tier_reader import TierReader
from deployments.protocol.kv_port import PlannedLoad
from deployments.redis_tier.actor import RedisTierConfig
from deployments.redis_tier.server import EmbeddedRedis
from deployments.segment_store.endpoint import RedisEndpoint, open_store
from deployments.segment_store.key_names import segment_prefix
from deployments.transfer.segment_copy import SegmentCopier
from kernels.paged.layout import LayoutKind, PagedLayout
from kvmanager.config import ManagerConfig
from kvmanager.index.locations import Tier
from kvmanager.segments.format import verify
from kvmanager.segments.keys import EXACT, BlockHash
from kvmanager.segments.spans import SegmentSpan, split_segments
from load_tests.harness.disturbed_redis import disturbed
from load_tests.harness.emulated_link import EmulatedLink
from load_tests.harness.engine import SECRET
from load_tests.harness.patience import until
from load_tests.harness.tiers import MIB, Tiers

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
REPLICA = "replica"


@dataclass(slots=True)
class Timing:
    """One load: seconds until the first segment was in the KV cache, and until the last; how many workers brought them,
    and whether one of them was so late that others were asked too."""

    first_s: float
    all_s: float
    workers: int
    asked_again: bool


def spread_loads_over(tier: Any, workers: int | None) -> None:
    """Let a CPU tier's every load use so many of its workers; None: as many as the pool chooses."""

    def act(tier: Any, wanted: int | None) -> None:
        fan_out = tier._redis._fan_out
        vars(fan_out).pop("choose", None)
        if wanted is not None:
            fan_out.choose = lambda nbytes, pieces, ready, alone: min(wanted, pieces, ready)

    ray.get(tier.__ray_call__.remote(act, workers), timeout=PATIENCE_S)


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
            hashes = b"".join(self.hashes[span.start_block : span.end_block])
            yield span, source.read(span, hashes, range(span.start_block, span.end_block), EXACT)

    def write(self, load: PlannedLoad, sealed: memoryview) -> None:
        """Verify a segment and put it into its blocks, as `deployments.transfer.threads` does."""
        self.copier.write(sealed, load, 0, range(load.start_block, load.end_block))

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
        app = f"prefetch-{'emulated' if link else 'plain'}"
        prefix = segment_prefix(app, FINGERPRINT)
        self._endpoint = RedisEndpoint(server.url, prefix, FINGERPRINT, PATIENCE_S, 0, SECRET)
        store = open_store(self._endpoint)
        for span, buffer in cache.sealed():
            store.put(span.key, buffer.data)
        config = RedisTierConfig(app, server.url, "", app, 256 * MIB, 0, PATIENCE_S)
        self._tiers = Tiers(
            app, ManagerConfig(blocks_per_segment=SEGMENT_BLOCKS), 128 * MIB, WORKERS, disturbed(config, link)
        )
        self._tiers.wait_until_ready(self._keep_alive)
        until(lambda: self._tiers.ask_tier("stats")["workers"] == WORKERS, "all workers have started")
        self._reader = TierReader(
            app, REPLICA, self._tiers.node, self._degraded, self._wrong, PortWaits(),
            {Tier.CPU.value: PATIENCE_S, Tier.REDIS.value: PATIENCE_S},
        )  # fmt: skip

    def load(self, workers: int | None) -> Timing:
        """One load of the whole prefix; then the CPU tier is emptied."""
        spread_loads_over(self._tiers.tier, workers)
        before = self._tiers.ask_tier("stats")["loads_by_workers"]
        self._keep_alive()
        plan = self._tiers.ask("plan", REPLICA, self._tiers.node, self._cache.hashes)
        lease_id, loads = plan["lease_id"], plan["segments"]
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
        self._tiers.ask("release", [lease_id])
        after = self._tiers.ask_tier("stats")["loads_by_workers"]
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
        self._tiers.close()

    def _keep_alive(self) -> None:
        """A replica that is silent while the others have their turn is forgotten."""
        self._tiers.keep_alive(FINGERPRINT, REPLICA)

    def _empty_cpu_tier(self) -> None:
        until(self._tiers.at_rest, "nothing is held or on its way")
        self._tiers.ask("api", "clear", ["cpu"], PATIENCE_S)

    def _degraded(self, what: str) -> None:
        if what == "redis_asked_again":
            self._asked_again = True
            return
        raise RuntimeError(f"a load was degraded: {what}")

    def _wrong(self, what: str, load: PlannedLoad) -> None:
        raise RuntimeError(f"{what}: segment at block {load.start_block}")


def _timed(step: Callable[[], Any]) -> float:
    began = time.perf_counter()
    step()
    return time.perf_counter() - began
