"""The device pool's free blocks go coldest first: the queue alone, in vLLM's own pool, and in an engine."""

from __future__ import annotations

import inspect
import random
from collections.abc import Sequence

import pytest
from live_engine import BLOCK, LiveEngine
from vllm.v1.core import block_pool
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.kv_cache_utils import (
    BlockHash,
    FreeKVCacheBlockQueue,
    KVCacheBlock,
    make_block_hash_with_group_id,
)

from deployments.engine.pool.hotness_queue import EMPTY, HotnessQueue, order_by_hotness, order_by_recency
from load_tests.harness.engine import prompt
from load_tests.harness.memory_port import MemoryPort

BLOCKS = 40

QUEUE_METHODS = {
    "__init__": ["blocks"],
    "popleft": [],
    "popleft_n": ["n"],
    "remove": ["block"],
    "append": ["block"],
    "prepend_n": ["blocks"],
    "append_n": ["blocks"],
    "get_all_free_blocks": [],
    "iter_blocks_after": ["cursor"],
}


class Pool:
    """vLLM's block pool with our queue, and a list that says in which order its free blocks should go."""

    def __init__(self) -> None:
        self.pool = BlockPool(BLOCKS, enable_caching=True, hash_block_size=BLOCK)
        self.queue = order_by_hotness(self.pool)
        self._hashes = 0

    def take(self, number: int) -> list[KVCacheBlock]:
        return self.pool.get_new_blocks(number)

    def fill(self, blocks: Sequence[KVCacheBlock]) -> None:
        """Give blocks a content of their own each."""
        for block in blocks:
            self._hashes += 1
            name = BlockHash(self._hashes.to_bytes(32, "big"))
            self.pool._insert_block_hash(make_block_hash_with_group_id(name, 0), block, num_tokens=None)

    def cached(self, number: int, score: float) -> list[KVCacheBlock]:
        """Blocks with a content of a score, in use."""
        blocks = self.take(number)
        self.fill(blocks)
        for block in blocks:
            self.queue.raise_score(block, score)
        return blocks

    def order(self) -> list[int]:
        """Ids of the free blocks, next victim first."""
        return [block.block_id for block in self.queue.iter_blocks_after(None)]


def ids(blocks: Sequence[KVCacheBlock]) -> list[int]:
    return [block.block_id for block in blocks]


def test_vllms_queue_is_the_one_that_ours_replaces() -> None:
    """Every method is either inherited on purpose or overridden; a new one would be neither."""
    found = {
        name: [parameter for parameter in inspect.signature(method).parameters if parameter != "self"]
        for name, method in vars(FreeKVCacheBlockQueue).items()
        if callable(method)
    }
    assert found == QUEUE_METHODS, (
        "vLLM changed FreeKVCacheBlockQueue: go through deployments/engine/pool/hotness_queue.py again"
    )
    used = {
        part.split("(")[0].split()[0].strip("):,")
        for part in inspect.getsource(block_pool).split("self.free_block_queue.")[1:]
    }
    assert used == {"popleft", "popleft_n", "remove", "append_n", "prepend_n", "num_free_blocks"}, used
    for name in ("prev_free_block", "next_free_block", "ref_cnt", "block_hash", "block_id", "is_null"):
        assert hasattr(KVCacheBlock(0), name), f"KVCacheBlock has no {name} any more"


def test_empty_blocks_go_first_then_the_coldest() -> None:
    made = Pool()
    warm, hot, cold = made.cached(3, 5.0), made.cached(3, 9.0), made.cached(3, 1.0)
    for blocks in (hot, warm, cold):
        made.pool.free_blocks(reversed(blocks))
    empty = BLOCKS - 1 - 9
    assert made.order()[empty:] == [*reversed(ids(cold)), *reversed(ids(warm)), *reversed(ids(hot))]

    taken = made.take(empty + 4)

    assert ids(taken[empty:]) == [*reversed(ids(cold)), ids(warm)[-1]]
    assert all(made.queue.score(block) == EMPTY for block in taken), "what is handed out has no score"


def test_what_nothing_is_known_of_counts_as_used_when_it_was_freed() -> None:
    made = Pool()
    blocks = made.take(3)
    made.fill(blocks)
    made.queue.raise_score(blocks[0], 2.0)
    made.queue.hear(1, 1.0)
    made.pool.free_blocks([blocks[0], blocks[1]])
    made.queue.hear(1, 3.0)
    made.pool.free_blocks([blocks[2]])
    assert made.order()[-3:] == [ids(blocks)[1], ids(blocks)[0], ids(blocks)[2]]


def test_a_free_block_whose_content_gets_hotter_moves_back() -> None:
    made = Pool()
    blocks = made.cached(3, 1.0)
    made.pool.free_blocks(blocks)
    made.queue.raise_score(blocks[0], 2.0)
    made.queue.raise_score(blocks[0], 0.5)
    assert made.order()[-3:] == [ids(blocks)[1], ids(blocks)[2], ids(blocks)[0]]


def test_what_is_evicted_from_the_cache_goes_with_the_empty_ones() -> None:
    made = Pool()
    blocks = made.cached(2, 7.0)
    made.pool.free_blocks(blocks)
    made.pool.evict_blocks({blocks[1].block_id})
    made.queue.emptied(blocks[1])
    assert made.order()[-2:] == [ids(blocks)[1], ids(blocks)[0]]
    assert made.queue.score(blocks[1]) == EMPTY
    made.pool.touch([blocks[1]])
    made.pool.free_blocks([blocks[1]])
    assert made.order()[0] == ids(blocks)[1], "an empty one that is freed is the next to go"


def test_a_new_managers_scores_are_compared_with_what_was_hot_under_the_old_one() -> None:
    made = Pool()
    assert made.queue.hear(1, 50.0)
    hot, cold = made.cached(1, 53.0), made.cached(1, 50.0)
    made.pool.free_blocks([*hot, *cold])

    assert made.queue.hear(2, 0.5)
    new = made.cached(1, 1.5)
    made.pool.free_blocks(new)

    assert made.order()[-3:] == ids([*cold, *new, *hot])
    assert not made.queue.hear(1, 51.0), "the old manager's answers come too late"
    assert made.queue.now == 0.5


def test_victims_are_counted_up_to_the_first_that_is_not_colder() -> None:
    made = Pool()
    made.pool.free_blocks(made.cached(2, 1.0) + made.cached(2, 3.0))
    empty = BLOCKS - 1 - 4
    assert made.queue.colder_than(0.5, BLOCKS) == empty
    assert made.queue.colder_than(1.0, BLOCKS) == empty
    assert made.queue.colder_than(3.0, BLOCKS) == empty + 2
    assert made.queue.colder_than(9.0, BLOCKS) == empty + 4
    assert made.queue.colder_than(9.0, 3) == 3


@pytest.mark.parametrize("seed", range(8))
def test_after_any_operations_victims_come_in_order_and_all_blocks_are_accounted_for(seed: int) -> None:
    draw = random.Random(seed)
    made = Pool()
    used: list[KVCacheBlock] = []
    for step in range(400):
        action = draw.randrange(6)
        free = made.queue.get_all_free_blocks()
        if action == 0 and free:
            number = draw.randint(1, len(free))
            expected = made.order()[:number]
            taken = [made.queue.popleft()] if number == 1 else made.take(number)
            if number == 1:
                made.pool._maybe_evict_cached_block(taken[0])
                taken[0].ref_cnt += 1
            assert ids(taken) == expected
            made.fill(draw.sample(taken, len(taken) // 2))
            used += taken
        elif action == 1 and used:
            draw.shuffle(used)
            number = draw.randint(1, len(used))
            made.pool.free_blocks(used[:number])
            used = used[number:]
        elif action == 2 and free:
            chosen = [block for block in draw.sample(free, min(3, len(free))) if block.block_hash]
            made.pool.touch(chosen)
            used += chosen
        elif action == 3:
            block = made.pool.blocks[draw.randrange(1, BLOCKS)]
            if block.block_hash:
                made.queue.raise_score(block, draw.randint(0, 5))
        elif action == 4:
            made.queue.hear(step // 100, step / 50)
        else:
            block = made.pool.blocks[draw.randrange(1, BLOCKS)]
            if block.block_hash:
                made.pool.evict_blocks({block.block_id})
                made.queue.emptied(block)
        order = made.queue.get_all_free_blocks()
        assert len(order) == made.queue.num_free_blocks == BLOCKS - 1 - len(used)
        assert {block.block_id for block in order}.isdisjoint(ids(used))
        scores = [made.queue.score(block) for block in order]
        assert scores == sorted(scores)
        assert all((score == EMPTY) == (block.block_hash is None) for block, score in zip(order, scores, strict=True))
        assert made.queue._keys == sorted(set(scores))
        assert set(made.queue._tails) == set(scores)
    made.pool.free_blocks(used)
    assert made.pool.get_num_free_blocks() == BLOCKS - 1


def test_with_equal_scores_the_order_is_vllms_own() -> None:
    """Differential: the same calls on a stock pool and on ours, without any score, take the same blocks."""
    stock, ours = BlockPool(BLOCKS, enable_caching=True, hash_block_size=BLOCK), Pool()
    draw = random.Random(1)
    held: list[tuple[list[KVCacheBlock], list[KVCacheBlock]]] = []
    name = 0
    for _ in range(300):
        number = draw.randint(1, 6)
        if draw.random() < 0.5 and stock.get_num_free_blocks() >= number:
            pair = stock.get_new_blocks(number), ours.pool.get_new_blocks(number)
            assert ids(pair[0]) == ids(pair[1])
            for left, right in list(zip(*pair, strict=True))[: draw.randint(0, number)]:
                name += 1
                whole = make_block_hash_with_group_id(BlockHash(name.to_bytes(32, "big")), 0)
                stock._insert_block_hash(whole, left, num_tokens=None)
                ours.pool._insert_block_hash(whole, right, num_tokens=None)
            held.append(pair)
        elif held:
            left_blocks, right_blocks = held.pop(draw.randrange(len(held)))
            stock.free_blocks(reversed(left_blocks))
            ours.pool.free_blocks(reversed(right_blocks))
    assert len(held) < 40


def test_vllms_own_queue_can_be_put_back() -> None:
    made = Pool()
    made.pool.free_blocks(made.cached(2, 3.0) + made.cached(2, 1.0))
    order = made.order()
    order_by_recency(made.pool)
    assert type(made.pool.free_block_queue) is FreeKVCacheBlockQueue
    assert ids(made.pool.get_new_blocks(BLOCKS - 1)) == order


def test_an_emptied_pool_forgets_all_scores() -> None:
    made = Pool()
    made.pool.free_blocks(made.cached(4, 3.0))
    assert made.pool.reset_prefix_cache()
    made.queue.all_emptied()
    assert all(made.queue.score(block) == EMPTY for block in made.pool.blocks)
    assert isinstance(made.pool.free_block_queue, HotnessQueue)
    made.pool.free_blocks(made.take(BLOCKS - 1))
    assert made.pool.get_num_free_blocks() == BLOCKS - 1


@pytest.mark.parametrize(("by_hotness", "kept_tokens"), [(True, 224), (False, 0)])
def test_a_hot_prompt_survives_a_scan_of_cold_ones(engine: LiveEngine, by_hotness: bool, kept_tokens: int) -> None:
    """224 tokens: all full blocks but the last token's. vLLM's own order keeps none of them."""
    hot = prompt(500, 7 * BLOCK + 8)
    engine.reuse.order_device(by_hotness).result()
    try:
        for _ in range(4):
            engine.ask(hot, max_tokens=4)
        for seed in range(12):
            engine.ask(prompt(600 + seed, 12 * BLOCK), max_tokens=4)
        engine.port = MemoryPort()  # from the device or not at all
        again, by_tier = engine.ask(hot, max_tokens=4)
        assert by_tier["device"] == kept_tokens
        engine.clear_device()
        engine.port = MemoryPort()
        assert engine.ask(hot, max_tokens=4)[0] == again
    finally:
        engine.reuse.order_device(True).result()
