"""The transfer threads of a replica: some load segments into device blocks, one saves device blocks as segments.

Life of a load:  submitted → fetching → verified and written, or failed from some block on → finished (always)
Life of a save:  submitted (blocks held) → offered → copied → blocks given back → stored, or dropped and counted

Loads never wait behind saves, and a load that hangs does not hold up the next one. A load always ends, at the latest
`load_deadline_s` after it was submitted; what did not arrive is reported as failed blocks, which vLLM recomputes. A
save is best effort: at most `max_held_blocks` device blocks are held for saves, what is beyond is dropped.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from deployments.kv_port import KVPort, PlannedLoad, SaveGrant
from kvmanager.segment_format import SegmentMismatch
from kvmanager.segments import SegmentSpan

if TYPE_CHECKING:
    from deployments.segment_copy import SegmentCopier

logger = logging.getLogger(__name__)

LOAD_THREADS = 4
"""So many loads may wait for a tier at once. Copying is short beside waiting, so more than the cores is right."""


@dataclass(frozen=True, slots=True)
class LoadJob:
    """Segments for one request. `block_ids` are the device blocks of the sequence from `first_block` on."""

    request_id: str
    lease_id: int
    loads: Sequence[PlannedLoad]
    first_block: int
    block_ids: Sequence[int]


@dataclass(frozen=True, slots=True)
class SaveJob:
    """Consecutive segments of one sequence; `block_ids[i]` are the device blocks of `spans[i]`."""

    spans: Sequence[SegmentSpan]
    block_ids: Sequence[Sequence[int]]
    give_back: Callable[[], None]

    @property
    def num_blocks(self) -> int:
        """Device blocks that the job holds."""
        return sum(len(ids) for ids in self.block_ids)


@dataclass(slots=True)
class TransferCounters:
    """What the threads have done since start. Written under `KVTransfer`'s lock, read by anyone."""

    segments_loaded: int = 0
    segments_saved: int = 0
    bytes_loaded: int = 0
    bytes_saved: int = 0
    loads_failed: int = 0
    saves_dropped: int = 0
    mismatches: dict[str, int] = field(default_factory=dict)


class KVTransfer:
    """Runs the transfer threads. `submit_load`, `submit_save` and the `take_*` methods belong to the engine thread."""

    def __init__(self, copier: SegmentCopier, port: KVPort, max_held_blocks: int, load_deadline_s: float) -> None:
        self.counters = TransferCounters()
        self._load_deadline_s = load_deadline_s
        self._copier = copier
        self._port = port
        self._max_held_blocks = max_held_blocks
        self._held_blocks = 0
        self._lock = threading.Lock()
        self._finished: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._loads: queue.SimpleQueue[tuple[LoadJob, float] | None] = queue.SimpleQueue()
        self._saves: queue.SimpleQueue[SaveJob | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run_loads, name=f"crosskv-load-{number}", daemon=True)
            for number in range(LOAD_THREADS)
        ]
        self._threads.append(threading.Thread(target=self._run_saves, name="crosskv-save", daemon=True))
        for thread in self._threads:
            thread.start()

    def submit_load(self, job: LoadJob) -> None:
        """Start a load. The job's blocks must not be read or reused until its request is in `take_finished_loads`."""
        self._loads.put((job, time.monotonic() + self._load_deadline_s))

    def submit_save(self, job: SaveJob) -> bool:
        """Start a save of blocks that the caller holds until `give_back`; False: over the limit, not started."""
        with self._lock:
            if self._held_blocks + job.num_blocks > self._max_held_blocks:
                return False
            self._held_blocks += job.num_blocks
        self._saves.put(job)
        return True

    def count_dropped(self, segments: int) -> None:
        """Note segments that will not be saved, because too many blocks were held when their request ended."""
        with self._lock:
            self.counters.saves_dropped += segments

    def take_finished_loads(self) -> set[str]:
        """Requests whose load has ended since the last call, well or not. Take failed blocks *after* this."""
        with self._lock:
            finished, self._finished = self._finished, set()
            return finished

    def take_failed_blocks(self) -> set[int]:
        """Device blocks whose KV did not arrive, since the last call."""
        with self._lock:
            failed, self._failed_blocks = self._failed_blocks, set()
            return failed

    def is_idle(self) -> bool:
        """Whether no save holds a block."""
        with self._lock:
            return self._held_blocks == 0

    def close(self) -> None:
        """End the threads after what they are doing now."""
        for _ in range(LOAD_THREADS):
            self._loads.put(None)
        self._saves.put(None)
        for thread in self._threads:
            thread.join(5.0)

    def _run_loads(self) -> None:
        while (item := self._loads.get()) is not None:
            job, deadline = item
            arrived = job.first_block
            try:
                arrived = self._load(job, deadline)
            except Exception:
                logger.exception("load of %s failed; its tokens are recomputed", job.request_id)
            failed = set(job.block_ids[arrived - job.first_block :])
            with self._lock:
                self.counters.loads_failed += bool(failed)
                self._failed_blocks |= failed
                self._finished.add(job.request_id)
            self._port.release(job.lease_id)

    def _load(self, job: LoadJob, deadline: float) -> int:
        """Write the job's segments in order; return the first sequence block that did not arrive."""
        arrived = job.first_block
        end = job.first_block + len(job.block_ids)
        for load, sealed in zip(job.loads, self._port.fetch(job.loads, deadline), strict=False):
            if sealed is None:
                break
            upto = min(load.end_block, end)
            wanted = job.block_ids[arrived - job.first_block : upto - job.first_block]
            try:
                self._copier.write(sealed, load.key, load.num_blocks, arrived - load.start_block, wanted)
            except SegmentMismatch as mismatch:
                reason = str(mismatch.reason)
                with self._lock:
                    self.counters.mismatches[reason] = self.counters.mismatches.get(reason, 0) + 1
                logger.warning("segment %s is not what was stored (%s); recomputing", load.key.hex()[:16], reason)
                self._port.report_bad(load, reason)
                break
            arrived = upto
            with self._lock:
                self.counters.segments_loaded += 1
                self.counters.bytes_loaded += len(sealed)
        return arrived

    def _run_saves(self) -> None:
        while (job := self._saves.get()) is not None:
            copied: list[tuple[SegmentSpan, Any]] = []
            grant: SaveGrant | None = None
            try:
                grant = self._port.offer(job.spans, [self._copier.sealed_bytes(len(ids)) for ids in job.block_ids])
                if grant is not None:
                    for span, ids in zip(job.spans, job.block_ids, strict=True):
                        if span.key in grant.keys:
                            copied.append((span, self._copier.read(span, ids)))
            except Exception:
                logger.exception("a save failed")
                copied.clear()
            finally:
                with self._lock:
                    self._held_blocks -= job.num_blocks
                job.give_back()
            kept = 0
            try:
                if grant is not None:
                    kept = self._port.store(grant, copied)
            except Exception:
                logger.exception("a save failed")
            wanted = len(job.spans) if grant is None else len(grant.keys)
            with self._lock:
                self.counters.saves_dropped += wanted - kept
                self.counters.segments_saved += kept
                self.counters.bytes_saved += sum(buffer.nbytes for _, buffer in copied[:kept])
