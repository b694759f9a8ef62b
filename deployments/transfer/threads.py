"""The transfer threads of a replica: some load segments into device blocks, one saves device blocks as segments.

Life of a load:  submitted → fetching → verified and written, or failed from some block on → finished (always)
Life of a save:  submitted (blocks held) → offered → copied → blocks given back → stored, or dropped and counted

Layerwise loads (`deployments.transfer.layerwise_load`) run on the same threads, and so does what other paths fetch; a
layerwise save is copied as the step that computes it goes on.

A load is for a request, or for a directive (`LoadJob.on_end`): then no request waits for its blocks, and it gives no
lease back. Loads never wait behind saves, and a load that hangs does not hold up the next one. A load always ends, at
the latest `LoadJob.within_s` after it has begun. It is given up when it has not begun within `load_deadline_s`, because
others take too long. What did not arrive is reported as failed blocks, which vLLM recomputes.

A save is best effort: at most `max_held_blocks` device blocks are held (a single segment that is larger goes alone),
what is beyond is dropped. So is what waits behind a tier that does not come to an end (`STALLED_S`), and what waits
while a request needs its blocks (`drop_waiting_saves`).
"""

from __future__ import annotations

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Iterable
from contextvars import Context, copy_context
from functools import partial
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from deployments.protocol.kv_port import KVPort, SaveGrant
from deployments.transfer.jobs import LoadJob, LoadTime, SaveJob, StatePart, TransferCounters
from deployments.transfer.layerwise_save import StepDiscardedError
from deployments.transfer.layerwise_streams import HostStreams
from deployments.transfer.segment_copy import NULL_BLOCK
from kvmanager.loading.load_rates import Sample
from kvmanager.moves.plan import PlannedLoad
from kvmanager.segments.format import SegmentMismatch
from kvmanager.segments.spans import SegmentSpan, cut_ends

if TYPE_CHECKING:
    from deployments.transfer.layerwise_streams import TransferStreams
    from deployments.transfer.segment_copy import SegmentCopier

__all__ = ["KVTransfer", "LoadJob", "SaveJob", "TransferCounters"]

logger = logging.getLogger(__name__)

STALLED_S = 5.0
"""A tier that takes this long for one save counts as hung: the blocks of the saves behind it are needed elsewhere."""
LOAD_THREADS = 4
"""Number of loads that may wait for a tier at once. Waiting dominates copying, so more than the cores is right."""


class KVTransfer:
    """Runs the transfer threads. `submit_load`, `submit_save` and the `take_*` methods belong to the engine thread."""

    def __init__(
        self,
        copier: SegmentCopier,
        port: KVPort,
        max_held_blocks: int,
        blocks_per_segment: int,
        load_deadline_s: float,
        on_rate: Callable[[Sample], None] = lambda sample: None,
        on_load_end: Callable[[], None] = lambda: None,
        streams: TransferStreams | None = None,
    ) -> None:
        """`on_rate` hears, from any load thread, what the port is told of how long loads took.

        `on_load_end` is called, from any load thread, when a request's load is in `take_finished_loads`. `streams`: on
        which loads are written; none for a cache in host memory.
        """
        self._on_rate = on_rate
        self._on_load_end = on_load_end
        self._streams: TransferStreams = streams or HostStreams()
        self.counters = TransferCounters()
        self._load_deadline_s = load_deadline_s
        self._copier = copier
        self._port = port
        self._max_held_blocks = max_held_blocks
        self._blocks_per_segment = blocks_per_segment
        self._held_blocks = 0
        self._loads_under_way = 0
        self._storing_since = math.inf
        self._has_dropped = False
        self._lock = threading.Lock()
        self._finished: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._failed_requests: set[str] = set()
        self._loads: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._saves: queue.SimpleQueue[tuple[SaveJob, Context] | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run_loads, name=f"crosskv-load-{number}", daemon=True)
            for number in range(LOAD_THREADS)
        ]
        self._threads.append(threading.Thread(target=self._run_saves, name="crosskv-save", daemon=True))
        for thread in self._threads:
            thread.start()

    def submit_load(self, job: LoadJob, deadline: float = math.inf) -> None:
        """Start a load, which ends before `deadline` too (on `time.monotonic`'s clock).

        The job's blocks must not be read or reused until its request is in `take_finished_loads`, or `on_end` called.
        """
        begin_by = min(deadline, time.monotonic() + self._load_deadline_s)
        self._submit(partial(self._run_load, job, begin_by, deadline, self._streams.mark_compute()))

    def submit_fetch(self, run: Callable[[KVPort], None]) -> None:
        """Have a load thread run a load that ends by itself, such as `deployments.transfer.layerwise_load`.

        Where the engine's step waits for it: only when `has_idle_loader`, so that it waits for no other load.
        """
        self._submit(partial(run, self._port))

    def end_load(self, request_id: str, failed: Iterable[int]) -> None:
        """A request's load has ended that ends by itself: all its blocks but `failed` are filled."""
        with self._lock:
            self._failed_blocks |= set(failed)
            self._finished.add(request_id)
        self._on_load_end()

    def note_segment(self, nbytes: int) -> None:
        """Note a segment that has arrived in host memory, of which `nbytes` were read."""
        with self._lock:
            self.counters.segments_loaded += 1
            self.counters.bytes_loaded += nbytes

    @property
    def has_idle_loader(self) -> bool:
        """Whether a load that is submitted now begins at once."""
        return self._loads_under_way < LOAD_THREADS

    def _submit(self, run: Callable[[], None]) -> None:
        with self._lock:
            self._loads_under_way += 1
        self._loads.put(partial(copy_context().run, run))

    def count_shared(self, tokens: int) -> None:
        """Note a request that waited for another one's load, which brought `tokens` of its tokens."""
        with self._lock:
            self.counters.loads_shared += tokens > 0

    def note_layerwise(self, job: LoadJob, nbytes: int, seconds: float, arrived: int) -> None:
        """A layerwise load has ended: of `job` everything before block `arrived` is there.

        `nbytes` have arrived, in `seconds`; 0: not all of it.
        """
        tiers = {load.tier for load in job.loads}
        if seconds and len(tiers) == 1:
            tokens = len(job.block_ids) * self._copier.layout.block_size
            self._report_rate(("load", tiers.pop(), tokens, nbytes, seconds))
        with self._lock:
            self.counters.loads_layerwise += 1
            self.counters.loads_failed += arrived < job.first_block + len(job.block_ids)
            self.counters.segments_loaded += sum(part.end_block <= arrived for part in job.parts)
            self.counters.bytes_loaded += nbytes
        self._port.release(job.lease_id)

    def note_mismatch(self, load: PlannedLoad, mismatch: SegmentMismatch) -> None:
        """A segment is not what was stored. From any load thread."""
        reason = str(mismatch.reason)
        with self._lock:
            self.counters.mismatches[reason] = self.counters.mismatches.get(reason, 0) + 1
        logger.warning("segment %s is not what was stored (%s); recomputing", load.key.hex()[:16], reason)
        self._port.report_bad(load, reason)

    def sealed_bytes(self, num_blocks: int) -> int:
        """Return the bytes of host memory that a segment of `num_blocks` blocks takes."""
        return self._copier.sealed_bytes(num_blocks)

    def submit_save(self, job: SaveJob) -> bool:
        """Start a save of blocks that the caller holds until `give_back`; False: over the limit, not started.

        Not either while a save before it has been at its tier for `STALLED_S`; what waits is dropped then.
        """
        if time.monotonic() - self._storing_since > STALLED_S:
            self.drop_waiting_saves()
            return False
        with self._lock:
            goes_alone = not self._held_blocks and job.num_blocks <= self._blocks_per_segment
            if not goes_alone and self._held_blocks + job.num_blocks > self._max_held_blocks:
                return False
            self._held_blocks += job.num_blocks
        self._saves.put((job, copy_context()))
        return True

    def blocks_that_fit(self) -> int:
        """How many blocks a save may hold now; those of a segment at least where nothing is held."""
        with self._lock:
            room = self._max_held_blocks - self._held_blocks
            return room if self._held_blocks else max(room, self._blocks_per_segment)

    def drop_waiting_saves(self) -> None:
        """Give the blocks of all saves back that have not begun: a request needs them. Any thread."""
        dropped: list[SaveJob] = []
        with contextlib.suppress(queue.Empty):
            while (waiting := self._saves.get_nowait()) is not None:
                dropped.append(waiting[0])
            self._saves.put(None)  # the thread must end, as it was told
        for job in dropped:
            with self._lock:
                self._held_blocks -= job.num_blocks
                self.counters.saves_dropped += self._segments(job)
            job.give_back()
            job.on_end(None)
        if any(job.block_ids for job in dropped) and not self._has_dropped:
            self._has_dropped = True
            logger.warning("saves are dropped: a tier hangs, or a request needs their blocks (counted, logged once)")

    def count_dropped(self, segments: int) -> None:
        """Note segments that will not be saved, because too many blocks were held when their request ended."""
        with self._lock:
            self.counters.saves_dropped += segments

    def count_short(self) -> None:
        """Note a sequence that was not saved, because loading it would not be faster than computing it."""
        with self._lock:
            self.counters.saves_short += 1

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

    def take_failed_requests(self, finished: set[str]) -> set[str]:
        """Of requests whose load has ended, those that must compute their prompt: their load was all or nothing."""
        with self._lock:
            failed = self._failed_requests & finished
            self._failed_requests -= failed
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
        while (run := self._loads.get()) is not None:
            try:
                run()
            except Exception:
                logger.exception("a load ended in an error; its thread goes on")
            with self._lock:
                self._loads_under_way -= 1

    def _run_load(self, job: LoadJob, begin_by: float, deadline: float, computed: Any) -> None:
        arrived = job.first_block
        try:
            now = time.monotonic()
            if now < begin_by:
                within_s = self._load_deadline_s if job.within_s is None else job.within_s
                arrived = self._load(job, min(deadline, now + within_s), computed)
        except Exception:
            logger.exception("load of %s failed; its tokens are recomputed", job.request_id)
        failed = set(job.block_ids[arrived - job.first_block :])
        with self._lock:
            self.counters.loads_failed += bool(failed)
            if job.on_end is None:
                if failed and job.tables:
                    self._failed_requests.add(job.request_id)
                else:
                    self._failed_blocks |= failed
                self._finished.add(job.request_id)
        if job.on_end is None:
            self._on_load_end()
            self._port.release(job.lease_id)
        else:
            job.on_end(arrived)

    def _load(self, job: LoadJob, deadline: float, computed: Any) -> int:
        """Write the job's segments in order; return the first sequence block that did not arrive.

        `computed` marks what may still read the blocks. What is written has arrived when the device says so: the
        engine's next step may run on any stream.
        """
        arrived = job.first_block
        took: dict[str, LoadTime] = {}
        last = time.monotonic()
        if job.cutoff is not None:
            job.cutoff.begins(last)
        fetched = iter(self._port.fetch(job.fetched, deadline))
        for part, sealed in zip(job.parts, fetched, strict=False):
            if sealed is None:
                break
            try:
                with self._streams.loading(computed):
                    if job.write is not None:
                        job.write(sealed, part.load)
                    else:
                        to = job.ids_of(part), job.tables_of(part)
                        self._copier.write(sealed, part.load, part.skip_blocks, *to)
                self._streams.await_loads()
            except SegmentMismatch as mismatch:
                self.note_mismatch(part.load, mismatch)
                break
            now = time.monotonic()
            took.setdefault(part.load.tier, LoadTime()).add(part.blocks, part.nbytes, now - last)
            arrived, last = part.end_block, now
            with self._lock:
                self.counters.segments_loaded += 1
                self.counters.bytes_loaded += part.nbytes
            if job.cutoff is not None and not job.cutoff.arrived(now):
                break
        whole = arrived == job.first_block + len(job.block_ids)
        if whole and job.state is not None:
            whole = self._load_state(job.state, next(fetched, None), computed)
        if job.brings_all_or_nothing and not whole:
            arrived = job.first_block
        if job.write is not None:  # other bytes a token: no sample of what a dense load takes
            return arrived
        for tier, time_of in took.items():
            tokens = time_of.blocks * self._copier.layout.block_size
            self._report_rate(("load", tier, tokens, time_of.nbytes, time_of.seconds))
        return arrived

    def _load_state(self, part: StatePart, sealed: memoryview | None, computed: Any) -> bool:
        """Write the states at a load's end; return whether they are there, and as they were stored."""
        if sealed is None or any(part.tables[group][0] == NULL_BLOCK for _, group in part.copier.group_runs):
            return False
        try:
            with self._streams.loading(computed):
                part.copier.write(sealed, part.load, 0, (), part.tables)
            self._streams.await_loads()
        except SegmentMismatch as mismatch:
            self.note_mismatch(part.load, mismatch)
            return False
        self.note_segment(part.load.nbytes)
        return True

    def _report_rate(self, sample: Sample) -> None:
        self._port.report_rate(sample)
        self._on_rate(sample)

    def _run_saves(self) -> None:
        while (waiting := self._saves.get()) is not None:
            job, context = waiting
            context.run(self._run_save, job)

    def _run_save(self, job: SaveJob) -> None:
        copied: list[tuple[SegmentSpan, Any]] = []
        grant: SaveGrant | None = None
        try:
            grant = self._port.offer(job.offered, self._segment_bytes(job)) if job.num_blocks else None
            if grant is not None:
                copied = self._copy(job, grant)
        except StepDiscardedError:
            copied.clear()
        except Exception:
            logger.exception("a save failed")
            copied.clear()
        finally:
            with self._lock:
                self._held_blocks -= job.num_blocks
            job.give_back()
        kept = 0
        self._storing_since = time.monotonic()
        try:
            if grant is not None:
                kept = self._port.store(grant, [(span, self._with_tail(job, sealed)) for span, sealed in copied])
        except Exception:
            logger.exception("a save failed")
        finally:
            self._storing_since = math.inf
        wanted = self._segments(job) if grant is None else len(grant.spans)
        with self._lock:
            self.counters.saves_dropped += wanted - kept
            self.counters.segments_saved += kept
            self.counters.bytes_saved += sum(buffer.nbytes for _, buffer in copied[:kept])
        job.on_end(None if grant is None or len(copied) < len(grant.spans) else kept)

    def _copy(self, job: SaveJob, grant: SaveGrant) -> list[tuple[SegmentSpan, Any]]:
        """The granted segments, sealed. Raises StepDiscardedError when the step that computes them does not count."""
        copier = job.copier or self._copier
        if job.progress is None:
            return [
                (
                    span,
                    copier.read(span, job.hashes_of(span), job.ids_of(span), job.fidelity, job.tables_of(span)),
                )
                for span in takewhile(job.can_copy, grant.spans)
            ]
        reads = [
            self._copier.begin_read(span, job.hashes_of(span), job.ids_of(span), job.fidelity) for span in grant.spans
        ]
        job.progress.copy(reads)
        return [(span, read.finish()) for span, read in zip(grant.spans, reads, strict=True)]

    def _with_tail(self, job: SaveJob, sealed: Any) -> Any:
        if job.tail is None:
            return sealed
        try:
            return job.tail.append(sealed)
        except Exception:
            logger.exception("a segment is stored without what goes behind it")
            return sealed

    def _segment_bytes(self, job: SaveJob) -> list[int]:
        blocks = range(1, self._blocks_per_segment + 1)
        tail, copier = job.tail, job.copier or self._copier
        return [copier.sealed_bytes(count) + (tail.nbytes(count) if tail is not None else 0) for count in blocks]

    def _segments(self, job: SaveJob) -> int:
        """Into how many segments a job is cut where nothing of it is stored."""
        first, end, prompt = job.offered[1:4]
        return len(cut_ends(first, end, self._blocks_per_segment, prompt))
