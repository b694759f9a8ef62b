"""Devices to replay on: vLLM's block pool in each order that a server may choose, and one that knows the future.

A device holds a request's blocks from its start to its end, prompt and answer, and frees them end first, as vLLM does.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import BlockHash, make_block_hash_with_group_id

from deployments.engine.pool.hotness_queue import order_by_hotness, score_blocks, score_found
from load_tests.simulator.turn_replay import Turn

BLOCK = 16
"""Tokens; the pool wants a number, and nothing here depends on it."""


@dataclass(slots=True)
class Use:
    """What a request's plan says of its prompt: `(end_block, score)` of what is known, and the score of one use now."""

    scores: Sequence[tuple[int, float]]
    now: float
    epoch: int = 1


class Device(Protocol):
    """A device's blocks."""

    def found(self, turn: Turn) -> int:
        """Return how many leading blocks of the prompt are here."""
        ...

    def begin(self, turn: Turn, use: Use) -> bool:
        """Hold all blocks of a request; False: there is no room until another one ends."""
        ...

    def end(self, turn: Turn) -> None:
        """Let its blocks go."""
        ...


class PoolDevice:
    """vLLM's own block pool, ordered by `kv.device_policy`."""

    def __init__(self, blocks: int, policy: str) -> None:
        """`blocks` can be held; vLLM keeps one more for itself."""
        self.pool = BlockPool(blocks + 1, enable_caching=True, hash_block_size=BLOCK)
        self.queue = order_by_hotness(self.pool) if policy == "hotness" else None
        self._held: dict[int, tuple[list[Any], Use]] = {}

    def found(self, turn: Turn) -> int:
        """See `Device`."""
        return len(self._cached(turn.hashes[: turn.prompt_blocks]))

    def begin(self, turn: Turn, use: Use) -> bool:
        """See `Device`."""
        cached = self._cached(turn.left)
        idle = sum(block.ref_cnt == 0 for block in cached)
        if len(turn.left) - len(cached) > self.pool.get_num_free_blocks() - idle:
            return False
        if self.queue is not None:
            self.queue.hear(use.epoch, use.now)
            score_found(self.queue, use, cached)
        self.pool.touch(cached)
        new = self.pool.get_new_blocks(len(turn.left) - len(cached))
        for name, block in zip(turn.left[len(cached) :], new, strict=True):
            self.pool._insert_block_hash(make_block_hash_with_group_id(BlockHash(name), 0), block, num_tokens=None)
        self._held[turn.number] = [*cached, *new], use
        return True

    def end(self, turn: Turn) -> None:
        """See `Device`."""
        blocks, use = self._held.pop(turn.number)
        if self.queue is not None:
            score_blocks(self.queue, use, blocks)
        self.pool.free_blocks(reversed(blocks))

    def _cached(self, hashes: Sequence[bytes]) -> list[Any]:
        blocks: list[Any] = []
        for name in hashes:
            cached = self.pool.get_cached_block(BlockHash(name), [0])
            if cached is None:
                break
            blocks += cached
        return blocks


class ClairvoyantDevice:
    """Evicts the block whose next use is furthest away (Belady, 1966): what no order surpasses by much.

    A chain's end is never used before its beginning, so leaves go first by themselves.
    """

    def __init__(self, blocks: int, turns: Sequence[Turn]) -> None:
        self._blocks = blocks
        self._users: dict[bytes, int] = {}
        self._idle: dict[bytes, int] = {}
        """Of a block that no request holds: the number of the heap entry that counts."""
        self._order: list[tuple[float, int, bytes]] = []
        self._numbers = itertools.count()
        self._uses: dict[bytes, deque[int]] = defaultdict(deque)
        for turn in turns:
            for name in turn.hashes[: turn.prompt_blocks]:
                self._uses[name].append(turn.number)

    def found(self, turn: Turn) -> int:
        """See `Device`."""
        prompt = turn.hashes[: turn.prompt_blocks]
        return next((at for at, name in enumerate(prompt) if name not in self._users), len(prompt))

    def begin(self, turn: Turn, use: Use) -> bool:
        """See `Device`."""
        needed = sum(name not in self._users or name in self._idle for name in turn.left)
        if needed > self._blocks - len(self._users) + len(self._idle):
            return False
        for name in turn.left:
            self._idle.pop(name, None)
            self._users[name] = self._users.get(name, 0) + 1
        while len(self._users) > self._blocks:
            _, number, victim = heapq.heappop(self._order)
            if self._idle.get(victim) == number:
                del self._idle[victim], self._users[victim]
        return True

    def end(self, turn: Turn) -> None:
        """See `Device`."""
        for name in reversed(turn.left):
            self._users[name] -= 1
            if not self._users[name]:
                uses, number = self._uses[name], next(self._numbers)
                while uses and uses[0] <= turn.number:
                    uses.popleft()
                self._idle[name] = number
                heapq.heappush(self._order, (-uses[0] if uses else float("-inf"), number, name))
