"""The device pool's free blocks go by rank: the queue alone, in vLLM's own pool, and in an engine."""

from __future__ import annotations

import inspect
import random
from collections.abc import Sequence
from dataclasses import dataclass

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

from deployments.engine.pool.hotness_queue import (
    EMPTY,
    NOTHING,
    HotnessQueue,
    order_by_hotness,
    order_by_recency,
    score_blocks,
    score_found,
)
from kvmanager.eviction.device_ranks import SHARES
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


def test_empty_blocks_go_first_then_those_used_once_used_again_and_used_often_coldest_first() -> None:
    made = Pool()
    hot, often, again, once = (made.cached(2, score) for score in (9.0, 4.0, 1.0, 0.0))
    for blocks in (often, hot, again, once):
        made.pool.free_blocks(reversed(blocks))
    empty = BLOCKS - 1 - 8
    assert made.order()[empty:] == [
        *reversed(ids(once + again)[:2]),
        *reversed(ids(again)),
        *ids(often + hot)[1::-1],
        *reversed(ids(hot)),
    ]

    taken = made.take(empty + 3)

    assert ids(taken[empty:]) == [*reversed(ids(once)), ids(again)[-1]]
    assert all(made.queue.score(block) == EMPTY for block in taken), "what is handed out has no score"


def test_of_blocks_used_once_or_again_what_was_used_least_recently_goes_first() -> None:
    made = Pool()
    first, second, third = (made.cached(1, score) for score in (0.3, 0.0, 0.2))
    made.pool.free_blocks([*first, *second, *third])
    assert made.order()[-3:] == ids([*first, *second, *third]), "less than one and a half uses is one use"
    again = made.cached(1, 2.0) + made.cached(1, 1.0)
    made.pool.free_blocks(again)
    assert made.order()[-2:] == ids(again)


def test_a_block_counts_by_its_uses_when_it_is_freed() -> None:
    made = Pool()
    blocks = made.take(3)
    made.fill(blocks)
    made.queue.hear(1, 0.0)
    made.queue.raise_score(blocks[0], 1.0)
    made.pool.free_blocks([blocks[0]])
    made.queue.raise_score(blocks[1], 1.0)
    made.queue.hear(1, 3.0)
    made.pool.free_blocks([blocks[1], blocks[2]])
    assert made.order()[-3:] == [ids(blocks)[1], ids(blocks)[2], ids(blocks)[0]], "three half-lives later it is cold"


@pytest.mark.parametrize(("score", "share"), [(1.0, 0.4), (9.0, 0.1)])
def test_what_a_rank_has_no_room_for_falls_to_the_end_of_the_one_below(score: float, share: float) -> None:
    made = Pool()
    most = int(share * BLOCKS)
    once = made.cached(2, 0.0)
    made.pool.free_blocks(once)
    first, others = made.cached(1, score), made.cached(most, score)
    made.pool.free_blocks(first)
    assert made.order()[-1] == ids(first)[0]
    made.pool.free_blocks(others)
    assert made.order()[-3 - most :] == ids([*once, *first, *others])
    below = made.cached(1, 0.0 if score == 1.0 else 1.0)
    made.pool.free_blocks(below)
    assert made.order()[-2 - most :] == ids([*first, *below, *others]), "it is one of those below now, and the older"


def test_a_scan_of_any_length_leaves_what_was_used_again() -> None:
    made = Pool()
    again = made.cached(5, 1.0)
    made.pool.free_blocks(reversed(again))
    for _ in range(100):
        scan = made.take(20)
        made.fill(scan)
        made.pool.free_blocks(reversed(scan))
    assert made.order()[-5:] == [*reversed(ids(again))]


def test_a_free_block_whose_content_gets_hotter_moves_back() -> None:
    made = Pool()
    blocks = made.cached(3, 0.5)
    made.pool.free_blocks(blocks)
    made.queue.raise_score(blocks[0], 2.0)
    made.queue.raise_score(blocks[0], 0.1)
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
    hot, cold = made.cached(1, 54.0), made.cached(1, 50.0)
    made.pool.free_blocks([*hot, *cold])

    assert made.queue.hear(2, 0.5)
    new = made.cached(1, 3.9)
    made.pool.free_blocks(new)

    assert made.order()[-3:] == ids([*cold, *new, *hot])
    assert not made.queue.hear(1, 51.0), "the old manager's answers come too late"
    assert made.queue.now == 0.5


def test_victims_are_counted_up_to_the_first_that_stays_longer() -> None:
    made = Pool()
    made.pool.free_blocks(made.cached(2, 0.0) + made.cached(2, 1.0) + made.cached(2, 4.0))
    empty = BLOCKS - 1 - 6
    assert made.queue.colder_than(0.0, BLOCKS) == empty + 2, "those used once are older than a use made now"
    assert made.queue.colder_than(1.0, BLOCKS) == empty + 4
    assert made.queue.colder_than(4.0, BLOCKS) == empty + 4
    assert made.queue.colder_than(9.0, BLOCKS) == empty + 6
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
        places = [made.queue._places[block.block_id] for block in order]
        assert places == sorted(places)
        assert all((score == EMPTY) == (block.block_hash is None) for block, score in zip(order, scores, strict=True))
        assert all((place == NOTHING) == (score == EMPTY) for place, score in zip(places, scores, strict=True))
        assert made.queue._keys == sorted(set(places))
        assert {place: block.block_id for place, block in made.queue._tails.items()} == {
            place: block.block_id for place, block in zip(places, order, strict=True)
        }
        if action == 1:
            for rank, share in SHARES.items():
                assert sum(place[0] == rank for place in places) <= share * BLOCKS
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


@dataclass
class Asked:
    """A request with what its plan says."""

    scores: Sequence[tuple[int, float]] = ()
    now: float = 0.0
    epoch: int = 0


def test_the_rest_of_a_prompt_that_returns_stays_as_its_beginning_does_and_that_of_another_does_not() -> None:
    made = Pool()
    returning, other = made.take(8), made.take(8)
    made.fill(returning + other)
    score_blocks(made.queue, Asked([(2, 1.0)]), returning)
    score_blocks(made.queue, Asked([(1, 5.0)]), other)
    assert [made.queue.score(block) for block in returning] == [1.0] * 8
    assert [made.queue.score(block) for block in other] == [5.0] + [0.0] * 7


def test_what_the_device_has_of_a_prompt_is_used_again_also_where_the_manager_knows_nothing() -> None:
    made = Pool()
    blocks = made.take(6)
    made.fill(blocks)
    asked = Asked()
    score_blocks(made.queue, asked, blocks[:4])
    made.pool.free_blocks(reversed(blocks))
    assert made.order()[-6:] == [*reversed(ids(blocks))]
    score_found(made.queue, asked, blocks[:2])
    assert made.order()[-6:] == [*reversed(ids(blocks[2:])), *ids(blocks[:2])]
    assert asked.scores == [(2, 1.0)], "the blocks that it brings follow it"


def test_a_request_of_a_manager_that_was_replaced_is_one_use_now() -> None:
    made = Pool()
    made.queue.hear(2, 7.0)
    blocks = made.take(2)
    made.fill(blocks)
    score_blocks(made.queue, Asked([(2, 60.0)], 50.0, epoch=1), blocks)
    assert [made.queue.score(block) for block in blocks] == [7.0, 7.0]


def test_a_block_is_used_until_its_request_ends() -> None:
    made = Pool()
    made.queue.hear(1, 1.0)
    blocks = made.take(1)
    made.fill(blocks)
    asked = Asked([(1, 2.0)], 1.0, epoch=1)
    made.queue.hear(1, 9.0)
    score_blocks(made.queue, asked, blocks)
    assert made.queue.score(blocks[0]) == 10.0


def test_vllms_own_queue_can_be_put_back() -> None:
    made = Pool()
    made.pool.free_blocks(made.cached(2, 4.0) + made.cached(2, 1.0))
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
