"""What the manager's core needs by the size of its index: time of a plan, a save and an eviction, memory, growth.

`measure` runs in a process of its own, so that its memory is the index's. Times are wall clock; `cpu` ones are the
thread's processor time, which other programs on the machine do not lengthen.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
import tracemalloc
from collections.abc import Iterator
from dataclasses import dataclass

import psutil

from kvmanager.config import ManagerConfig
from kvmanager.index.locations import Location, Tier
from kvmanager.manager import KVManager
from kvmanager.moves.plan import PlanQuery
from kvmanager.segments.keys import BlockHash
from kvmanager.segments.spans import SegmentSpan, split_segments
from load_tests.measuring.spread import percentile

SEGMENT_BLOCKS = 8
PROMPT_SEGMENTS = 128
"""32,768 tokens in segments of 256."""
SEGMENT_BYTES = 1_000_000
PLANS = 2000
COUNTED = 5_000
EVICTED = 1000
ROUNDS = 5
HOT_ENOUGH = 20
HERE = Location(Tier.CPU, "node")


def prompt(rng: random.Random, segments: int) -> tuple[list[BlockHash], list[SegmentSpan]]:
    """A prompt's block hashes, and its segments. The blocks of a segment have one hash: each mark is stored."""
    ends = [BlockHash(rng.randbytes(32)) for _ in range(segments)]
    hashes = [end for end in ends for _ in range(SEGMENT_BLOCKS)]
    return hashes, split_segments(hashes, 0, len(hashes), SEGMENT_BLOCKS, len(hashes))


def prompts(seed: int, segments: int, prompt_segments: int) -> Iterator[tuple[list[BlockHash], list[SegmentSpan]]]:
    """Yield prompts without a common prefix, of ``segments`` in all; always the same for one seed."""
    rng = random.Random(seed)
    for _ in range(segments // prompt_segments):
        yield prompt(rng, prompt_segments)


@dataclass(slots=True)
class CoreScale:
    """Milliseconds, bytes, and adopted segments a second."""

    segments: int
    plan_p50_ms: float
    plan_p99_ms: float
    plan_cpu_p50_ms: float
    plan_cpu_p99_ms: float
    save_p50_ms: float
    """Offer and commit of one segment."""
    evict_ms: float
    """Median of evictions of `EVICTED` segments by one offer."""
    evict_cpu_ms: float
    bytes_per_segment: float
    """Of `SEGMENT_BLOCKS` blocks."""
    bytes_per_block: float
    adopted_per_s: float
    collection_ms: float
    """A full garbage collection of the index, which `deployments.protocol.memory` spares the manager."""


def block_bytes() -> float:
    """Return what one more block of a segment adds to the index, in bytes by the allocator's count."""
    lengths, sizes = (SEGMENT_BLOCKS, 8 * SEGMENT_BLOCKS), []
    for blocks in lengths:
        gc.collect()
        tracemalloc.start()
        manager = KVManager(ManagerConfig(blocks_per_segment=blocks, max_deltas=1), epoch=1)
        manager.set_budget(HERE, 10**18)
        for number in range(COUNTED):
            hashes = [BlockHash(number.to_bytes(32, "little"))] * blocks
            manager.adopt(0.0, HERE, split_segments(hashes, 0, blocks, blocks, blocks), [SEGMENT_BYTES])
        sizes.append(tracemalloc.get_traced_memory()[0] / COUNTED)
        tracemalloc.stop()
    return (sizes[1] - sizes[0]) / (lengths[1] - lengths[0])


def measure(segments: int) -> CoreScale:
    """Fill an index with prompts of 128 segments and measure it. For a fresh process."""
    process = psutil.Process()
    # The log of deltas is left out: its size is fixed, some 10 MB for the default 65,536 events.
    manager = KVManager(ManagerConfig(blocks_per_segment=SEGMENT_BLOCKS, max_deltas=1), epoch=1)
    manager.set_budget(HERE, 10**18)
    # Planned are prompts from all over the index, few enough that what is left of it is colder than a new segment.
    step = max(5, segments // PROMPT_SEGMENTS // 200)
    kept: list[list[BlockHash]] = []
    gc.collect()
    before, began = process.memory_info().rss, time.perf_counter()
    for number, (hashes, spans) in enumerate(prompts(0, segments, PROMPT_SEGMENTS)):
        manager.adopt(0.0, HERE, spans, [SEGMENT_BYTES] * len(spans))
        if number % step == 0:
            kept.append(hashes)
        if number % 500 == 0:
            gc.freeze()  # as the manager's actor does
    filled_s = time.perf_counter() - began
    nodes = manager.stats(0.0)["nodes"]
    memory = (process.memory_info().rss - before) / nodes
    plans = [_plan(manager, kept[number % len(kept)]) for number in range(PLANS)]
    saves = [_save(manager, random.Random(f"save {number}")) for number in range(200)]
    evictions = [_evict(manager, random.Random(f"eviction {number}")) for number in range(ROUNDS)]
    gc.unfreeze()
    began = time.perf_counter()
    gc.collect()
    collection_s = time.perf_counter() - began
    wall, cpu = ([pair[which] * 1e3 for pair in plans] for which in (0, 1))
    return CoreScale(
        segments=nodes,
        plan_p50_ms=percentile(wall, 50),
        plan_p99_ms=percentile(wall, 99),
        plan_cpu_p50_ms=percentile(cpu, 50),
        plan_cpu_p99_ms=percentile(cpu, 99),
        save_p50_ms=percentile(saves, 50) * 1e3,
        evict_ms=statistics.median(wall_s for wall_s, _ in evictions) * 1e3,
        evict_cpu_ms=statistics.median(cpu_s for _, cpu_s in evictions) * 1e3,
        bytes_per_segment=memory,
        bytes_per_block=block_bytes(),
        adopted_per_s=nodes / filled_s,
        collection_ms=collection_s * 1e3,
    )


def _plan(manager: KVManager, hashes: list[BlockHash]) -> tuple[float, float]:
    began, cpu_began = time.perf_counter(), time.thread_time()
    plan = manager.plan(1.0, "replica", HERE.holder, PlanQuery(hashes))
    took = time.perf_counter() - began, time.thread_time() - cpu_began
    assert len(plan.segments) == PROMPT_SEGMENTS
    manager.release(plan.lease_id)
    return took


def _save(manager: KVManager, rng: random.Random) -> float:
    _, spans = prompt(rng, 1)
    began = time.perf_counter()
    offer = manager.offer(1.0, "replica", HERE, spans, [SEGMENT_BYTES])
    manager.commit(1.0, HERE, offer.keys, [SEGMENT_BYTES])
    took = time.perf_counter() - began
    assert offer.keys
    return took


def _evict(manager: KVManager, rng: random.Random) -> tuple[float, float]:
    """Wall and processor seconds of an offer, into a full tier, of one segment that is as large as 1,000 others."""
    manager.set_budget(HERE, manager.stats(1.0)["locations"][0]["bytes"])
    hashes, spans = prompt(rng, 1)
    for _ in range(HOT_ENOUGH):
        began, cpu_began = time.perf_counter(), time.thread_time()
        offer = manager.offer(1.0, "replica", HERE, spans, [EVICTED * SEGMENT_BYTES])
        took = time.perf_counter() - began, time.thread_time() - cpu_began
        if offer.keys:
            assert sum(len(directive.keys) for directive in offer.evict) == EVICTED
            manager.abandon(offer.save_id)
            return took
        for _ in range(EVICTED):  # asked for this often, it is worth the room of as many
            manager.plan(1.0, "replica", HERE.holder, PlanQuery(hashes))
    raise RuntimeError(f"a segment that was asked for {HOT_ENOUGH * EVICTED} times is granted no room")
