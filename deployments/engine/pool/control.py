"""Directives on a replica's device pool, carried out in slices that run on the engine thread between two steps.

Leans on vLLM's `BlockPool`: `get_cached_block`, `get_new_blocks`, `evict_blocks`, `touch`, `free_blocks`,
`_insert_block_hash`, `kv_event_queue`, `cached_block_hash_to_block`; and on no step being under way, so that a cached
block's KV is written.

Every method is one slice: it touches at most `MOST_BLOCKS` blocks (looks up `MOST_LOOKUPS`, passes `MOST_LOOKED_AT`),
changes the pool's books completely, reports what changed, and returns. `deployments.engine.directive_runner` makes
directives of slices. Only `cached_hashes`, for a manager that knows nothing of the device, is O(blocks).

Life of an onboarded block: taken from the free blocks and held by reference count → written by a load thread, which
verifies first → its hash enters the prefix cache → free, at its score's place. A block that did not arrive as it was
stored never gets a hash; it is free again and empty.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, cast

from vllm.distributed.kv_events import BlockStored
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from deployments.engine.pool.block_owners import NO_OWNER, BlockOwners, Owner
from deployments.engine.pool.hotness_queue import HotnessQueue, order_by_hotness, order_by_recency
from deployments.protocol.kv_port import OfferedBlocks
from deployments.transfer.held_save import HeldSaves
from deployments.transfer.threads import KVTransfer, LoadJob, SaveJob
from kvmanager.moves.plan import PlannedLoad
from kvmanager.segments.spans import NodeKind, SegmentSpan

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_utils import KVCacheBlock

MOST_BLOCKS = 64
"""Device blocks that one slice changes: about 0.2 ms of the engine's time. A single segment may have more."""
MOST_LOOKUPS = 256
MOST_LOOKED_AT = 1024
"""Device blocks that one slice of a clear passes: about 0.2 ms, where none of them is to be cleared."""
MOST_ROOTS = 1024
"""First blocks of what is never saved that are remembered before those are forgotten that the device has not."""
ONBOARDING_RESERVE = 0.1
"""Share of the pool that an onboarding leaves free: running requests need blocks while it loads."""


@dataclass(frozen=True, slots=True)
class Onboarding:
    """A sequence to be brought: its block hashes, its stored segments from block 0 on, how hot each block is."""

    hashes: Sequence[bytes]
    loads: Sequence[PlannedLoad]
    scores: Sequence[float]
    """Per block, never rising: the beginning of a sequence is as hot as its end, or hotter."""
    deadline: float
    """On `time.monotonic`'s clock."""
    owner: Owner = NO_OWNER
    """The owner, if known."""


class PoolControl:
    """See the module's docstring. `publish` reports the pool's events; `PlacementPublisher` has the other two."""

    def __init__(
        self,
        *,
        pool: BlockPool,
        transfer: KVTransfer,
        block_size: int,
        parents: Mapping[bytes, bytes | None],
        owners: BlockOwners,
        publish: Callable[[], None],
        on_engine_thread: Callable[[Callable[[], None]], Any],
        group: int = 0,
        has_windows: bool = False,
    ) -> None:
        """`group`: of layers, whose blocks count. `has_windows`: nothing is moved without a request, for what a window
        has kept on the device is not all that a segment holds.
        """
        self._group, self._has_windows = group, has_windows
        self._pool = pool
        self.queue: HotnessQueue | None = None
        """The pool's free blocks by hotness; None: vLLM's own order."""
        self._never_saved: set[bytes] = set()
        self._transfer = transfer
        self._saves = HeldSaves(pool, transfer, on_engine_thread)
        self._block_size = block_size
        self._parents = parents
        self._owners = owners
        self._publish = publish
        self._on_engine_thread = on_engine_thread
        self._clears: Counter[str | None] = Counter()
        """Times that all (None) or a tenant's blocks were cleared."""

    @property
    def needs_requests(self) -> bool:
        """Whether nothing is offloaded or onboarded without a request."""
        return self._has_windows

    def cached_hashes(self) -> list[bytes]:
        """Every block hash in the pool, once. O(blocks)."""
        hashes = dict.fromkeys(block.block_hash[:32] for block in self._cached_blocks() if block.block_hash)
        return list(filter(self.has, hashes)) if self._has_windows else list(hashes)

    def usage(self) -> dict[str, int]:
        """Blocks: all, free, cached (a prefix that lies there twice counts once). O(1)."""
        return {
            "blocks": self._pool.num_gpu_blocks,
            "free_blocks": self._pool.get_num_free_blocks(),
            "cached_blocks": len(self._pool.cached_block_hash_to_block),
        }

    def clear(self, tenant: str | None = None, first: int = 0) -> tuple[int, int]:
        """Empty a slice of the prefix cache, from device block `first` on, in use or not; onboardings under way too.

        With a `tenant` (by tag), only blocks that belong to it. Returns the number of blocks, and where the next slice
        begins; 0: it was the last one. What enters the pool between two slices may stay.
        """
        if first == 0:
            self._clears[tenant] += 1
        blocks: list[KVCacheBlock] = []
        end = min(first + MOST_LOOKED_AT, len(self._pool.blocks))
        for number in range(first, end):
            if len(blocks) == MOST_BLOCKS:
                end = number
                break
            block = self._pool.blocks[number]
            if block.block_hash is not None and (tenant is None or self._owners.owns(tenant, block.block_hash[:32])):
                blocks.append(block)
        if blocks:
            self._evict(blocks)
            self._publish()
        return len(blocks), end % len(self._pool.blocks)

    def evict(self, hashes: Iterable[bytes]) -> int:
        """Take unused blocks out of the prefix cache; return their number."""
        evicted = 0
        for block_hash in hashes:
            while (block := self._cached(block_hash)) is not None and block.ref_cnt == 0:  # it may lie here twice
                self._evict([block])
                evicted += 1
        self._publish()
        return evicted

    def forget(self, hashes: Iterable[bytes]) -> None:
        """Take blocks out of the prefix cache, in use or not. While a step is planned: vLLM publishes after it."""
        for block_hash in hashes:
            while (block := self._cached(block_hash)) is not None:  # it may lie here twice
                self._evict([block])

    def never_save(self, root: bytes) -> None:
        """From now on save nothing of a sequence with this first block."""
        if len(self._never_saved) >= MOST_ROOTS:
            self._never_saved = set(filter(self.has, self._never_saved))
        self._never_saved.add(root)

    def has(self, block_hash: bytes) -> bool:
        """Whether the prefix cache has a block."""
        return self._cached(block_hash) is not None

    def offload(self, spans: Sequence[SegmentSpan]) -> tuple[int, int, Future[int | None] | None]:
        """Start saving the first of `spans`, a chain: those that are here, up to one slice.

        Of a segment that the next one leaves inside, the blocks before that are saved: all are of one sequence.
        Returns how many segments were begun, how many blocks they have, and a future with how many of them are stored
        (None: a part failed). They are saved as the tenant's whose KV this is, which a manager that was started again
        may not know, and in its fidelity, which no manager knows. 0 segments: the first one, or what it follows on, is
        not here; no future: too many blocks are held for saves. O(blocks of the sequence).
        """
        begun = prompt_blocks = 0
        if self._has_windows:
            return 0, 0, None
        first = position = spans[0].start_block
        ids: list[int] = []
        hashes: list[bytes] = []
        for number, (span, below) in enumerate(zip_longest(spans, spans[1:]), start=1):
            if below is not None and below.start_block < span.end_block:
                continue  # what follows leaves it inside, and has all of its blocks that the chain needs
            upto = self._sequence(span, hashes)
            blocks = [self._cached(block_hash) for block_hash in upto[position:]]
            here = [block.block_id for block in blocks if block is not None]
            if len(here) < span.end_block - position or (begun and len(ids) + len(here) > MOST_BLOCKS):
                break
            if upto[0] in self._never_saved:
                break
            begun, position = number, span.end_block
            ids += here
            hashes = upto
        if not begun:
            return 0, 0, None
        last = spans[begun - 1]
        for span, below in zip_longest(spans[:begun], spans[1:begun]):
            if span.kind is NodeKind.REQUEST:
                prompt_blocks = span.end_block if below is None else below.start_block
        owner = self._owners.owner(last.key)
        offered = OfferedBlocks(cast("list[Any]", hashes), first, position, prompt_blocks, owner.tenant or last.tenant)
        stored: Future[int | None] = Future()
        fits = self._saves.submit(SaveJob(offered, ids, lambda: None, owner.fidelity, stored.set_result))
        return begun, len(ids), stored if fits else None

    def order(self, by_hotness: bool) -> HotnessQueue | None:
        """Choose the order in which free blocks go: coldest first, by the queue that is returned, or vLLM's own.

        Scores start over. Blocks of a model with windows always go in vLLM's own: no score says whether a window is
        still needed.
        """
        self.queue = order_by_hotness(self._pool) if by_hotness and not self._has_windows else None
        if self.queue is None:
            order_by_recency(self._pool)
        return self.queue

    def hear(self, epoch: int, now: float) -> bool:
        """A manager's time (`HotnessQueue.hear`); without hotness every manager is as good."""
        return self.queue is None or self.queue.hear(epoch, now)

    def reach(self, onboarding: Onboarding, start: int) -> int:
        """The first block from `start` on that is not here, `MOST_LOOKUPS` on at most; the others are as hot now."""
        end = min(len(onboarding.hashes), start + MOST_LOOKUPS)
        for number in range(start, end):
            block = self._cached(onboarding.hashes[number])
            if block is None:
                return number
            if self.queue is not None:
                self.queue.raise_score(block, onboarding.scores[number])
        return end

    def onboard(self, onboarding: Onboarding, first: int) -> Future[int] | None:
        """Start bringing the segments that hold block `first` and what follows; the future carries the block after.

        That is `first` again when nothing arrived. None: there is no room that something colder has. Raises ValueError
        when no segment holds block `first`.
        """
        loads: list[PlannedLoad] = []
        end = first
        for load in onboarding.loads:
            if load.start_block <= end < load.end_block:
                if loads and load.end_block - first > MOST_BLOCKS:
                    break
                loads.append(load)
                end = load.end_block
        if not loads:
            raise ValueError(f"no segment holds block {first}")
        blocks = None if self._has_windows else self._take_free(end - first, onboarding.scores[first])
        if blocks is None:
            return None
        done: Future[int] = Future()
        clears = self._clears_of(onboarding)
        if first == 0:
            self._owners.claim(onboarding.hashes[0], onboarding.owner)

        def finish(arrived: int) -> None:
            failure: BaseException | None = None
            end = first
            try:
                end = self._enter(
                    onboarding, first, arrived if clears == self._clears_of(onboarding) else first, blocks
                )
            except BaseException as error:
                failure = error
            self._pool.free_blocks(reversed(blocks))
            self._publish()
            # Last: a listener that hears of the end may ask what the device holds, and report it.
            if failure is None:
                done.set_result(end)
            else:
                done.set_exception(failure)

        job = LoadJob(
            request_id="an onboarding",
            lease_id=0,
            loads=loads,
            first_block=first,
            block_ids=[block.block_id for block in blocks],
            on_end=lambda arrived: self._on_engine_thread(lambda: finish(arrived)),
        )
        self._transfer.submit_load(job, onboarding.deadline)
        return done

    def _clears_of(self, onboarding: Onboarding) -> int:
        return self._clears[None] + self._clears[onboarding.owner.tenant]

    def _take_free(self, wanted: int, score: float) -> list[KVCacheBlock] | None:
        reserve = int(self._pool.num_gpu_blocks * ONBOARDING_RESERVE)
        if self._pool.get_num_free_blocks() - wanted < reserve:
            return None
        if self.queue is not None and self.queue.colder_than(score, wanted) < wanted:
            return None
        blocks = self._pool.get_new_blocks(wanted)
        self._publish()
        return blocks

    def _enter(self, onboarding: Onboarding, first: int, arrived: int, blocks: Sequence[KVCacheBlock]) -> int:
        """Let the blocks that arrived into the prefix cache; returns the block after the last."""
        hashes, pool = onboarding.hashes, self._pool
        end = first
        while end < arrived and (end == 0 or self._cached(hashes[end - 1])):
            if self._cached(hashes[end]) is None:  # else a request has computed it meanwhile
                block = blocks[end - first]
                whole = make_block_hash_with_group_id(BlockHash(hashes[end]), 0)
                pool._insert_block_hash(whole, block, num_tokens=(end + 1) * self._block_size)
                if self.queue is not None:
                    self.queue.raise_score(block, onboarding.scores[end])
            end += 1
        if end > first:
            pool.kv_event_queue.append(
                BlockStored(
                    block_hashes=list(hashes[first:end]),
                    parent_block_hash=hashes[first - 1] if first else None,
                    token_ids=[],
                    block_size=self._block_size,
                    lora_id=None,
                    medium=pool.medium,
                    lora_name=None,
                )
            )
        return end

    def _evict(self, blocks: Sequence[KVCacheBlock]) -> None:
        self._pool.evict_blocks({block.block_id for block in blocks})
        if self.queue is not None:
            for block in blocks:
                self.queue.emptied(block)

    def _sequence(self, span: SegmentSpan, before: list[bytes]) -> list[bytes]:
        """The hashes of a sequence up to a segment's end, found from its last to its first; empty: one is not here.

        `before`: those up to the end of a segment of the same sequence, if they are known.
        """
        back: list[bytes] = []
        known = before[-1] if before else None
        block_hash: bytes | None = span.key
        while block_hash != known:
            if block_hash is None or block_hash not in self._parents:
                return []
            back.append(block_hash)
            block_hash = self._parents[block_hash]
        hashes = before + back[::-1]
        return hashes if len(hashes) == span.end_block else []

    def _cached(self, block_hash: bytes) -> KVCacheBlock | None:
        cached = self._pool.get_cached_block(BlockHash(block_hash), [self._group])
        return cached[0] if cached else None

    def _cached_blocks(self) -> Iterator[KVCacheBlock]:
        return (block for block in self._pool.blocks if block.block_hash is not None)
