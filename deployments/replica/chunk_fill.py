"""Fills the cache with chunks that blended prompts bring and that are not stored yet (`blending.fill`).

A chunk is filled by an ordinary exact request that consists of it alone: the engine computes it and saves it, as any
other. KV from a prompt where others stood before the chunk is never stored for it.

* `idle`: after a blended prompt, its unknown chunks wait until the replica has nothing else to do (`idle_fills`).
* `first`: unknown chunks are computed before the prompt that brings them, all at once; the prompt is planned when they
  are stored, or when that takes too long. Prompts that bring the same chunks wait for the same computation. Where a
  tenant's prompt was not blended afterwards, nothing of that tenant's is filled first for `BACK_OFF_S`, and idle time
  serves instead.
* `manual`: nothing by itself. A fill ordered by hand (`by_hand`) waits for idle time, whatever the mode.

Nothing here fails a prompt: what cannot be filled is computed with it. On the replica's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from deployments.replica.fill_queue import ColdChunk
from deployments.replica.fill_suspects import FillSuspects
from deployments.replica.idle_fills import IdleFills

if TYPE_CHECKING:
    from deployments.protocol.wire import GenerateRequest

logger = logging.getLogger(__name__)

STORED_POLL_S, LONGEST_POLL_S = 0.01, 0.16
"""Pauses between two questions, each twice as long as the one before: a question carries all names of the chunks."""
STORED_WAIT_S, STORED_WAIT_SHARE = 0.25, 0.25
"""How long a prompt waits until its chunks are stored: seconds, plus a share of the time that computing them took."""
LOOK_UPS, LOOK_UP_PAUSE_S = 4, 0.25
"""Idle work asks again, after a pause that doubles, when the manager does not say in time what is stored."""
BACK_OFF_S = 60.0
KNOWN_S = 30.0
"""A chunk that was found, filled or given up is not looked at again for this long."""
MOST_KNOWN = 4096
OUTCOMES = ("filled", "failed", "refused", "interrupted", "dropped")

# Outcomes of a fill ordered by hand.
FILLED, STORED, NOT_BLENDED, NOT_STORED, FAILED = "filled", "stored", "not_blended", "not_stored", "failed"


class ChunkRefusedError(Exception):
    """The chunk may have ended an engine, or another replica computes it: it is not computed here now."""


class ChunkSource(Protocol):
    """Asks the manager: `deployments.engine.handle.EngineHandle`."""

    @property
    def terms(self) -> Mapping[str, Any]:
        """What the engine's load paths say for plans, by their names; without "blend" it blends nothing."""
        ...

    async def stored_chunks(self, sequences: Sequence[Sequence[bytes]]) -> list[int] | None:
        """How many leading blocks of each sequence are stored; None without an answer in time."""
        ...


@dataclass(slots=True)
class _Filling:
    task: asyncio.Task[bool]
    waiting: int = 0


class ChunkFill:
    """See the module's docstring.

    `compute` runs a chunk through the engine, to its end; what it raises is counted, a ChunkRefusedError by itself.
    `least_tokens`: prompts with fewer in their chunks are not worth a blend.
    """

    def __init__(
        self,
        mode: str,
        source: ChunkSource,
        compute: Callable[[ColdChunk], Awaitable[None]],
        block_tokens: int,
        least_tokens: int = 512,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.outcomes: Counter[str] = Counter(dict.fromkeys(OUTCOMES, 0))
        self._mode = mode
        self._source = source
        self._compute = compute
        self._block_tokens = block_tokens
        self._least_tokens = least_tokens
        self._clock = clock
        self._idle = IdleFills(self._filled, lambda chunk: chunk.fill_id in self._first, self._note, self.outcomes)
        self.suspects = FillSuspects()
        self._first: dict[str, _Filling] = {}
        """By the chunk's `fill_id`."""
        self._known: OrderedDict[bytes, float] = OrderedDict()
        """Chunks, by key, and until when they need not be looked at."""
        self._not_before: dict[str, float] = {}
        """Until when nothing is filled first, by tenant."""
        self._tasks: set[asyncio.Task[Any]] = set()

    def begins(self) -> None:
        """A client's prompt is here: what idle time was used for ends. Balanced by `ends`."""
        self._idle.begins()

    def ends(self) -> None:
        """A client's prompt has left."""
        self._idle.ends()

    async def before(self, request: GenerateRequest) -> bool:
        """Fill a prompt's unknown chunks, where that comes first; whether there were any. Does not raise.

        When the last client that waits for a chunk goes away, the chunk is aborted.
        """
        if self._mode != "first" or self._clock() < self._not_before.get(request.tenant, float("-inf")):
            return False
        chunks = self._chunks_of(request)
        if not chunks:
            return False
        cold = await self._unknown(request, chunks)
        if not cold:  # or the manager does not answer in time
            return False
        began = self._clock()
        joined = [self._join(chunk) for chunk in cold]
        for chunk in cold:
            self.suspects.begins(chunk, request.request_id)
        try:
            await asyncio.wait([filling.task for filling in joined])
        finally:
            for chunk, filling in zip(cold, joined, strict=True):
                self._leave(chunk, filling)
        await self._wait_until_stored(cold, self._clock() - began)
        return True

    def planned(self, request: GenerateRequest, filled: bool, blended: bool) -> None:
        """Note what became of a prompt for which chunks were `filled` first: whether it is `blended`.

        Why it is not may be its own doing, such as its ratio, so only its tenant is concerned.
        """
        if filled and not blended:
            self._not_before[request.tenant] = self._clock() + BACK_OFF_S
            logger.info(
                "chunks were filled first and not blended: for %.0f s nothing of their tenant's is filled first",
                BACK_OFF_S,
            )

    def after(self, request: GenerateRequest, own_tokens: int) -> None:
        """A prompt was answered: its unknown chunks wait for idle time. Returns at once.

        `own_tokens`: length of its own beginning that it found. By now all of it is stored under its own names, which
        says nothing of the next prompt with its chunks.
        """
        if self._mode == "manual":
            return
        chunks = [chunk for chunk in self._chunks_of(request) if not self._is_known(chunk.key)]
        if chunks:
            self._spawn(self._look_up(request, chunks, own_tokens))

    async def by_hand(self, request: GenerateRequest) -> str:
        """Fill the chunk that a request consists of, when there is nothing else to do; return the outcome.

        `FILLED`, `STORED`: it is stored, now or already. `NOT_BLENDED`: this replica does not blend. `NOT_STORED`: it
        was computed, and there was no room for it, or it was not reported as stored. `FAILED`: it was not computed.
        """
        hashes = request.block_hashes
        chunk = ColdChunk(request.prompt_token_ids, hashes, request.cache_salt, request.tenant)
        if self._source.terms.get("blend") is None:
            return NOT_BLENDED
        if await self._stored(chunk):
            self._note(chunk.key)
            return STORED
        self.suspects.begins(chunk, request.request_id)
        began = self._clock()
        if not await self._idle.end_of(chunk):
            return FAILED
        await self._wait_until_stored([chunk], self._clock() - began, again=True)
        return FILLED if await self._stored(chunk) else NOT_STORED

    async def _stored(self, chunk: ColdChunk) -> bool:
        found = await self._source.stored_chunks([chunk.block_hashes])
        return found is not None and found[0] >= len(chunk.block_hashes)

    def families(self) -> list[Metric]:
        """What an operator sees of it."""
        return fill_families(self.outcomes, len(self._idle))

    def close(self) -> None:
        """Give up what is under way."""
        self._idle.close()
        for task in (*self._tasks, *(filling.task for filling in self._first.values())):
            task.cancel()

    # What is unknown.

    def _chunks_of(self, request: GenerateRequest) -> list[ColdChunk]:
        """A prompt's chunks that can be stored, each once; none where they are not worth a blend."""
        blend = request.extras.get("blend")
        if blend is None or self._source.terms.get("blend") is None:
            return []
        chunks: dict[bytes, ColdChunk] = {}
        tokens = end = 0
        for chunk in blend.chunks:
            stop = chunk.start_token + chunk.tokens
            full_blocks = chunk.tokens // self._block_tokens
            fits = end <= chunk.start_token < stop <= len(request.prompt_token_ids)
            if fits and full_blocks and len(chunk.block_hashes) == full_blocks:
                ids = request.prompt_token_ids[chunk.start_token : stop]
                found = ColdChunk(ids, chunk.block_hashes, blend.chunk_salt, request.tenant)
                chunks.setdefault(found.key, found)
                tokens += full_blocks * self._block_tokens
                end = stop
        return list(chunks.values()) if tokens >= self._least_tokens else []

    async def _unknown(
        self, request: GenerateRequest, chunks: Sequence[ColdChunk], own_tokens: int | None = None
    ) -> list[ColdChunk] | None:
        """Those of a prompt's chunks that are not stored, and not in its own beginning; None without an answer.

        `own_tokens`: how long that is; None: as long as what is stored under the prompt's own names.
        """
        if all(self._is_known(chunk.key) for chunk in chunks):
            return []
        own = [request.block_hashes, request.exact_block_hashes] if own_tokens is None else []
        found = await self._source.stored_chunks([*own, *(chunk.block_hashes for chunk in chunks)])
        if found is None or len(found) != len(own) + len(chunks):
            return None
        reached = max(found[: len(own)]) * self._block_tokens if own_tokens is None else own_tokens
        ends = {}
        for place in request.extras["blend"].chunks if "blend" in request.extras else ():
            if place.block_hashes:
                ends[place.block_hashes[-1]] = place.start_token + place.tokens
        cold = []
        for chunk, blocks in zip(chunks, found[len(own) :], strict=True):
            # What lies in this prompt's beginning is not stored as a chunk: other prompts may want it.
            in_beginning = ends[chunk.key] // self._block_tokens * self._block_tokens <= reached
            if blocks >= len(chunk.block_hashes):
                self._note(chunk.key)
            elif not in_beginning and not self._is_known(chunk.key):
                cold.append(chunk)
        return cold

    async def _look_up(self, request: GenerateRequest, chunks: Sequence[ColdChunk], own_tokens: int) -> None:
        cold, pause_s = await self._unknown(request, chunks, own_tokens), LOOK_UP_PAUSE_S
        for _ in range(LOOK_UPS - 1):
            if cold is not None:
                break
            await asyncio.sleep(pause_s)
            cold, pause_s = await self._unknown(request, chunks, own_tokens), 2 * pause_s
        for chunk in cold or ():
            self._idle.add(chunk)

    def _is_known(self, key: bytes) -> bool:
        until = self._known.get(key)
        return until is not None and until > self._clock()

    def _note(self, key: bytes) -> None:
        self._known.pop(key, None)
        self._known[key] = self._clock() + KNOWN_S
        while len(self._known) > MOST_KNOWN:
            self._known.popitem(last=False)
        self._idle.forget_tries(key)

    # At once.

    def _join(self, chunk: ColdChunk) -> _Filling:
        """The computation of a chunk, which begins unless it is under way."""
        filling = self._first.get(chunk.fill_id)
        if filling is None:
            filling = self._first[chunk.fill_id] = _Filling(asyncio.get_running_loop().create_task(self._filled(chunk)))
        filling.waiting += 1
        return filling

    def _leave(self, chunk: ColdChunk, filling: _Filling) -> None:
        """Wait for a chunk no more; the last one to leave ends its computation."""
        filling.waiting -= 1
        if not filling.waiting:
            filling.task.cancel()
            if self._first.get(chunk.fill_id) is filling:
                del self._first[chunk.fill_id]

    async def _filled(self, chunk: ColdChunk) -> bool:
        """Compute a chunk; whether that went well. Raises nothing but CancelledError."""
        self.suspects.begins(chunk)
        try:
            await self._compute(chunk)
        except asyncio.CancelledError:
            self.outcomes["interrupted"] += 1
            raise
        except ChunkRefusedError:
            self.outcomes["refused"] += 1
            self._note(chunk.key)
            return False
        except Exception as error:
            if not self.outcomes["failed"]:
                logger.warning("a chunk could not be filled (counted from now on, logged once)", exc_info=error)
            self.outcomes["failed"] += 1
            self._note(chunk.key)
            return False
        self.suspects.ended_well(chunk)
        self.outcomes["filled"] += 1
        return True

    async def _wait_until_stored(self, chunks: Sequence[ColdChunk], took_s: float, again: bool = False) -> None:
        """What is saved is found a moment after it was computed. What is not found in time is not tried again soon.

        `again`: also what is known; of a prompt's chunks, those are known that failed.
        """
        deadline = self._clock() + STORED_WAIT_S + STORED_WAIT_SHARE * took_s
        left = [chunk for chunk in chunks if again or not self._is_known(chunk.key)]
        pause = STORED_POLL_S
        while left:
            found = await self._source.stored_chunks([chunk.block_hashes for chunk in left])
            if found is None:
                return
            stored = [blocks >= len(chunk.block_hashes) for chunk, blocks in zip(left, found, strict=True)]
            late = self._clock() >= deadline
            for chunk, there in zip(left, stored, strict=True):
                if there or late:
                    self._note(chunk.key)
            left = [] if late else [chunk for chunk, there in zip(left, stored, strict=True) if not there]
            if left:
                await asyncio.sleep(pause)
                pause = min(2 * pause, LONGEST_POLL_S)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def fill_families(outcomes: Mapping[str, int], waiting: int) -> list[Metric]:
    """Chunks by how their computation ended, and those that wait."""
    fills = CounterMetricFamily(
        "crosskv_chunk_fills",
        "Chunks computed alone, by how that ended; `refused`: they may have ended a replica, or another one does it.",
        labels=["outcome"],
    )
    for outcome, count in sorted(outcomes.items()):
        fills.add_metric([outcome], count)
    return [fills, GaugeMetricFamily("crosskv_chunks_waiting", "Chunks that wait for idle time.", value=waiting)]
