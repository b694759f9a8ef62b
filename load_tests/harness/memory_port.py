"""`KVPort`s in memory, for an engine without Ray: one that keeps all it is offered, one over a manager's brain."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from deployments.protocol.kv_port import LayerArrival, OfferedBlocks, SaveGrant, in_layer_groups
from kvmanager.config import ManagerConfig
from kvmanager.index.hotness import HotnessClock
from kvmanager.index.locations import Location, Tier
from kvmanager.manager import KVManager
from kvmanager.moves.plan import Plan, PlannedLoad, PlanQuery
from kvmanager.moves.plan_draft import PlanExtension
from kvmanager.segments.format import read_header
from kvmanager.segments.keys import HASH_BYTES, BlockHash
from kvmanager.segments.spans import MARK_BYTES, SegmentSpan, split_segments

LEASE_ID = 7
HERE = Location(Tier.CPU, "node")
REPLICA = "replica"


class MemoryPort:
    """Stores everything that is offered, in a dict. `spoil` may replace fetched bytes, or lose them by returning None.

    `before_fetch` and `before_offer` may block or raise in the transfer threads; `on_store` hears the key of every
    segment that is stored, also of one that is stored twice.
    """

    def __init__(self) -> None:
        self.segments: dict[bytes, tuple[SegmentSpan, bytes]] = {}
        self.spoil: Callable[[bytes], bytes | None] = lambda sealed: sealed
        self.on_device: set[bytes] = set()
        self.epoch = 1
        self.clock = HotnessClock(1000)
        self.hotness: dict[bytes, float] = {}
        self.bad: list[str] = []
        self.released: list[int] = []
        self.rates: list[Any] = []
        self.refuse_offers = False
        self.before_fetch: Callable[[], None] = lambda: None
        self.fetches = 0
        self.last_deadline = 0.0
        self.before_offer: Callable[[], None] = lambda: None
        self.offered: list[bytes] = []
        self.on_store: Callable[[bytes], None] = lambda key: None

    def plan(self, hashes: Sequence[bytes], used: bool = True) -> Plan:
        """Whatever leading blocks of the prompt lie in stored segments."""
        known = map(self.hotness.__getitem__, itertools.takewhile(self.hotness.__contains__, hashes))
        scores = self._count_use(hashes) if used else list(enumerate(known, start=1))
        segments: list[PlannedLoad] = []
        position = 0
        while (found := self._furthest(hashes, position)) is not None:
            segments.append(found)
            position = found.end_block
        now = self.clock.now
        return Plan(LEASE_ID, tuple(segments), scores=tuple(scores), now=now, epoch=self.epoch)

    def plan_blend(
        self,
        hashes: Sequence[bytes],
        chunks: Sequence[tuple[int, Sequence[bytes]]],
        ratio: float,
        check_layer: int,
        seconds: float = 0.0,
    ) -> Plan:
        """The same, and whatever leading blocks of chunks: where each begins, and its names as a prompt of its own."""
        from kvmanager.extensions.blend.chunks import BLEND, PlannedBlend, PlannedChunk  # a core without it runs too

        plan = self.plan(hashes)
        found = [(start, self.plan(names, used=False).segments) for start, names in chunks]
        stored = tuple(PlannedChunk(start, loads) for start, loads in found if loads)
        blend = PlannedBlend(stored, ratio, check_layer, seconds)
        return replace(plan, extras={BLEND: blend}) if stored else plan

    def _furthest(self, hashes: Sequence[bytes], position: int) -> PlannedLoad | None:
        """What lies behind some blocks of a prompt in the segment that reaches furthest; None: in none."""
        reaches = []
        for span, sealed in list(self.segments.values()):  # other threads store meanwhile
            own, used = read_header(sealed), 0
            for number, wanted in enumerate(hashes[span.start_block : span.end_block]):
                if own.block_hash(number) != wanted:
                    break
                used += 1
            if span.start_block <= position < span.start_block + used:
                reaches.append((span.start_block + used, used, span, len(sealed)))
        if not reaches:
            return None
        end, used, span, nbytes = max(reaches, key=lambda reach: reach[:2])
        last = b"" if used == span.num_blocks else hashes[end - 1]
        return PlannedLoad(span.key, span.start_block, span.num_blocks, *HERE, nbytes, nbytes, used, last)

    def _count_use(self, hashes: Sequence[bytes]) -> list[tuple[int, float]]:
        """As the manager does, with a segment per block."""
        self.clock.tick()
        scores: list[tuple[int, float]] = []
        for number, block_hash in enumerate(hashes, start=1):
            known = self.hotness.get(block_hash)
            self.hotness[block_hash] = self.clock.now if known is None else self.clock.used(known)
            if known is not None:
                scores.append((number, self.hotness[block_hash]))
        return scores

    def fetch(self, loads: Sequence[PlannedLoad], deadline: float) -> Iterator[memoryview | None]:
        """See `KVPort`; as `deployments.port.tier_reader` it ends with the first that does not come."""
        assert len({load.key for load in loads}) == len(loads), "a segment is asked for once in a fetch"
        self.fetches += 1
        self.last_deadline = deadline
        self.before_fetch()
        for load in loads:
            held = self.segments.get(load.key)
            sealed = self.spoil(held[1]) if held is not None else None
            yield memoryview(sealed) if sealed is not None else None
            if sealed is None:
                return

    def brings_layers(self, tier: str) -> bool:
        """See `KVPort`."""
        return True

    def fetch_layers(
        self, loads: Sequence[PlannedLoad], group_ends: Sequence[int], deadline: float
    ) -> Iterator[LayerArrival]:
        """See `KVPort`."""
        return in_layer_groups(self.fetch(loads, deadline), group_ends)

    def offer(self, offered: OfferedBlocks, segment_bytes: Sequence[int]) -> SaveGrant | None:
        """See `KVPort`."""
        self.before_offer()
        hashes, first, end, prompt, tenant = offered
        spans = split_segments(hashes, first, end, len(segment_bytes), prompt, tenant)
        self.offered += [span.key for span in spans]
        if self.refuse_offers:
            return None
        return SaveGrant(1, tuple(span for span in spans if span.key not in self.segments))

    def store(self, grant: SaveGrant, segments: Sequence[tuple[SegmentSpan, Any]]) -> int:
        """See `KVPort`."""
        for span, buffer in segments:
            self.on_store(span.key)
            self.segments[span.key] = (span, buffer.tobytes())
        return len(segments)

    def report_bad(self, load: PlannedLoad, reason: str) -> None:
        """See `KVPort`."""
        self.bad.append(reason)
        self.segments.pop(load.key, None)

    def report_placement(self, stored: list[bytes], removed: list[bytes], cleared: bool) -> None:
        """See `KVPort`."""
        if cleared:
            self.on_device.clear()
        self.on_device |= set(stored)
        self.on_device -= set(removed)

    def report_rate(self, sample: Any) -> None:
        """See `KVPort`."""
        self.rates.append(sample)

    def plan_again(self, query: PlanQuery, on_plan: Callable[[Plan | None], None]) -> None:
        """See `KVPort`."""
        on_plan(self.plan(query.hashes))

    def release(self, lease_id: int) -> None:
        """See `KVPort`."""
        self.released.append(lease_id)


class BrainPort(MemoryPort):
    """Stores what a manager's brain grants, and plans what it plans. One lock around the brain."""

    def __init__(
        self, blocks_per_segment: int, extensions: Sequence[PlanExtension] = (), block_tokens: int = 32
    ) -> None:
        super().__init__()
        self.extras: Mapping[str, Any] = {}
        """What every query asks of the extensions."""
        self.prompt_tokens = 0
        """Of the next prompt; 0: as many as its blocks have."""
        self.brain = KVManager(
            ManagerConfig(blocks_per_segment=blocks_per_segment, block_tokens=block_tokens),
            epoch=1,
            extensions=extensions,
        )
        self.brain.set_budget(HERE, 1 << 40)
        self.lock = threading.Lock()

    def plan(self, hashes: Sequence[bytes], used: bool = True) -> Plan:
        """What the manager's actor answers; not `used`: what it sends with a promotion."""
        names = list(map(BlockHash, hashes))
        with self.lock:
            if used:
                return self.brain.plan(time.monotonic(), REPLICA, HERE.holder, self._query(names))
            return self.brain.reserve(time.monotonic(), REPLICA, HERE.holder, names)

    def _query(self, names: Sequence[BlockHash]) -> PlanQuery:
        return PlanQuery(names, prompt_tokens=self.prompt_tokens, extras=self.extras)

    def lose_all(self) -> None:
        """The tier is emptied."""
        with self.lock:
            self.brain.clear({Tier.CPU})
            self.segments.clear()

    def offer(self, offered: OfferedBlocks, segment_bytes: Sequence[int]) -> SaveGrant | None:
        """See `KVPort`."""
        with self.lock:
            spans = self.brain.cut(HERE, *offered)
            sizes = [segment_bytes[span.num_blocks - 1] for span in spans]
            offer = self.brain.offer(time.monotonic(), REPLICA, HERE, spans, sizes)
        granted = set(offer.keys)
        return SaveGrant(offer.save_id, tuple(span for span in spans if span.key in granted))

    def store(self, grant: SaveGrant, segments: Sequence[tuple[SegmentSpan, Any]]) -> int:
        """See `KVPort`."""
        with self.lock:
            super().store(grant, segments)
            sizes = [buffer.nbytes for _, buffer in segments]
            return len(self.brain.commit(time.monotonic(), HERE, [span.key for span, _ in segments], sizes))

    def report_bad(self, load: PlannedLoad, reason: str) -> None:
        """See `KVPort`; here it is a bug."""
        raise AssertionError(f"a stored segment is wrong: {reason}")

    def report_placement(self, stored: list[bytes], removed: list[bytes], cleared: bool) -> None:
        """See `KVPort`."""
        with self.lock:
            if cleared:
                self.brain.device_cleared(REPLICA)
            self.brain.device_removed(REPLICA, map(BlockHash, removed))
            self.brain.device_stored(REPLICA, map(BlockHash, stored))

    def release(self, lease_id: int) -> None:
        """See `KVPort`."""
        with self.lock:
            self.brain.release(lease_id)


def made_up_hashes(span: SegmentSpan) -> bytes:
    """The hashes of a segment's blocks, together: those that its key and its marks may stand for."""
    marks = [span.marks[at : at + MARK_BYTES] for at in range(0, len(span.marks) - MARK_BYTES, MARK_BYTES)]
    return b"".join(mark.ljust(HASH_BYTES, b"\1") for mark in marks) + span.key
