"""The KV of a blend's chunks, on its way from the tiers into host memory. On a load thread, but `let_go` and `runs`.

Only layers from the check layer on are verified and copied. What is missing, late, damaged or beyond the buffer is
left out, and so is the rest of its chunk: these tokens become rows of which nothing is stored. Never raises for it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from deployments.engine.load_paths.blending.job import ReusedRun
from deployments.protocol.kv_port import KVPort
from deployments.transfer.jobs import LoadPart, load_parts
from kvmanager.extensions.blend.chunks import PlannedChunk
from kvmanager.moves.plan import PlannedLoad
from kvmanager.segments.format import SegmentMismatch

if TYPE_CHECKING:
    from deployments.transfer.layerwise_save import HostBuffer
    from deployments.transfer.segment_copy import SegmentCopier
    from deployments.transfer.threads import KVTransfer

logger = logging.getLogger(__name__)


class _Wanted(NamedTuple):
    """A segment of a chunk, and which of the prompt's rows it brings."""

    chunk: int
    start_token: int
    """Of the chunk."""
    part: LoadPart
    rows: range


class ChunkLoad:
    """See the module's docstring. A `deployments.engine.load_paths.blending.job.ReusedKV`.

    Two hold it: the thread that fetches and the blend. When both have let go, its memory and the plan's lease go back.
    """

    def __init__(
        self,
        chunks: Sequence[PlannedChunk],
        rows: range,
        check_layer: int,
        copier: SegmentCopier,
        buffer: HostBuffer,
        transfer: KVTransfer,
        deadline: float,
        on_over: Callable[[], None],
        give_lease: Callable[[], None],
    ) -> None:
        """`rows`: positions of the blend; `deadline`: on `time.monotonic`'s clock; `on_over` hears when it is over."""
        self._copier = copier
        self._buffer = buffer
        self._transfer = transfer
        self._deadline = deadline
        self._on_over = on_over
        self._give_lease = give_lease
        self._layers = range(check_layer, len(copier.layers))
        self._wanted = list(_wanted(chunks, rows, copier.layout.block_size))
        self._runs: list[ReusedRun] = []
        self._taken = 0
        self._holders = 2
        self._left = False
        self.vain_s = 0.0
        """Seconds that were waited for what did not come. Final when it `is_over`."""
        self._lock = threading.Lock()
        self._over = threading.Event()

    @property
    def is_over(self) -> bool:
        """See `ReusedKV`."""
        return self._over.is_set()

    def runs(self) -> list[ReusedRun]:
        """See `ReusedKV`."""
        return sorted(self._runs, key=lambda run: run.start)

    def run(self, port: KVPort) -> None:
        """Fetch; ends by its deadline. On a load thread."""
        try:
            self._fetch(port)
        except Exception:
            logger.exception("the chunks of a blend could not be fetched; what has not come is computed")
        finally:
            self._over.set()
            self._on_over()
            self._let_go()

    def let_go(self) -> None:
        """The blend has ended, or was given up: nothing of this will be read again. Once."""
        self._left = True
        self._let_go()

    def _let_go(self) -> None:
        with self._lock:
            self._holders -= 1
            if self._holders:
                return
        self._runs.clear()
        self._buffer.give(self._taken)
        self._give_lease()

    def _fetch(self, port: KVPort) -> None:
        """Each segment once, also one that two chunks begin with.

        A fetch ends with the first that does not come: what other chunks want after it is asked for again.
        """
        ended: set[int] = set()
        left: dict[bytes, list[_Wanted]] = {}
        for wanted in self._wanted:
            left.setdefault(wanted.part.load.key, []).append(wanted)
        while left and time.monotonic() < self._deadline:
            loads = [each[0].part.load for each in left.values()]
            asked = time.monotonic()
            for load, sealed in zip(loads, port.fetch(loads, self._deadline), strict=False):
                if self._left:
                    return
                for wanted in left.pop(load.key):
                    if wanted.chunk in ended or sealed is None or not self._take(wanted, sealed):
                        ended.add(wanted.chunk)
                if sealed is None:
                    self.vain_s += time.monotonic() - asked
                    break
                asked = time.monotonic()
            else:
                return
            wanted_still = ((key, [one for one in each if one.chunk not in ended]) for key, each in left.items())
            left = {key: each for key, each in wanted_still if each}

    def _take(self, wanted: _Wanted, sealed: memoryview) -> bool:
        """Verify and copy what is wanted of a segment; False: it is not what was stored, or there is no room."""
        part, rows = wanted.part, wanted.rows
        nbytes = self._bytes_of(len(rows))
        if not self._buffer.take(nbytes):
            return False
        self._taken += nbytes
        try:
            opened = self._copier.open(sealed, part.load)
            opened.verify(self._layers, part.skip_blocks, part.blocks)
        except SegmentMismatch as mismatch:
            self._transfer.note_mismatch(part.load, mismatch)
            return False
        values = opened.values(self._layers, part.skip_blocks, part.blocks)
        begins = wanted.start_token + (part.end_block - part.blocks) * self._copier.layout.block_size
        kept = values[:, :, rows.start - begins : rows.stop - begins]
        kv = kept.clone(memory_format=torch.contiguous_format)
        self._runs.append(ReusedRun(rows.start, wanted.start_token, kv, part.load.tier))
        self._transfer.note_segment(nbytes)
        return True

    def _bytes_of(self, tokens: int) -> int:
        per_layer = self._copier.block_bytes // (len(self._copier.layers) * self._copier.layout.block_size)
        return per_layer * len(self._layers) * tokens


def _wanted(chunks: Sequence[PlannedChunk], rows: range, block_size: int) -> Iterator[_Wanted]:
    """The segments that bring any of `rows`: positions of the prompt."""
    for number, (start, loads) in enumerate(chunks):
        first = max(0, rows.start - start) // block_size
        end = max((load.end_block for load in loads), default=0)
        for part in load_parts(loads, first, end):
            stop = start + part.end_block * block_size
            brought = range(max(stop - part.blocks * block_size, rows.start), min(stop, rows.stop))
            if brought:
                yield _Wanted(number, start, part, brought)


def reused_end(chunks: Sequence[PlannedChunk], block_size: int) -> int:
    """The position behind the last token that a chunk brings; 0 for none."""
    return max((start + _end(loads) * block_size for start, loads in chunks), default=0)


def _end(loads: Sequence[PlannedLoad]) -> int:
    return max((load.end_block for load in loads), default=0)
