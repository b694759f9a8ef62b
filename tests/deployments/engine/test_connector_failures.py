"""Whatever happens to a load or a save, the request ends with the tokens that plain computation gives."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from live_engine import BLOCK, PATIENCE_S, LiveEngine, usage

from load_tests.harness.engine import greedy, prompt
from load_tests.harness.memory_port import LEASE_ID, MemoryPort
from load_tests.harness.patience import patience, until

LENGTH = 500  # 15 full blocks: segments of 4, 4, 4 and 3 blocks


@pytest.fixture
def stored(engine: LiveEngine, request: pytest.FixtureRequest) -> tuple[list[int], list[int]]:
    """A prompt that only the port holds, a different one per test, and its answer."""
    tokens = prompt(hash_of(request.node.name), LENGTH)
    answer, _ = engine.ask(tokens)
    engine.clear_device()
    return tokens, answer


def hash_of(name: str) -> int:
    return sum(ord(letter) * (position + 1) for position, letter in enumerate(name))


def only_segment(index: int, change: Callable[[bytes], bytes | None]) -> Callable[[bytes], bytes | None]:
    """A `spoil` that changes the segment fetched as number `index`, once."""
    position = -1

    def spoil(sealed: bytes) -> bytes | None:
        nonlocal position
        position += 1
        return change(sealed) if position == index else sealed

    return spoil


def flip_bit(offset: int) -> Callable[[bytes], bytes]:
    def flip(sealed: bytes) -> bytes:
        spoiled = bytearray(sealed)
        spoiled[offset] ^= 0x10
        return bytes(spoiled)

    return flip


@pytest.mark.parametrize(
    ("segment", "loaded_blocks"), [(0, 0), (2, 8), (3, 12)], ids=["first segment", "third segment", "last segment"]
)
@pytest.mark.parametrize(
    ("offset", "reason"), [(-1, "checksum"), (5_000, "checksum"), (50, "header"), (150, "header"), (0, "magic")]
)
def test_a_flipped_bit_costs_a_recompute_and_is_reported(
    engine: LiveEngine,
    stored: tuple[list[int], list[int]],
    segment: int,
    loaded_blocks: int,
    offset: int,
    reason: str,
) -> None:
    tokens, answer = stored
    before = set(engine.port.segments)
    counted = engine.transfer.counters.mismatches.get(reason, 0)
    engine.port.spoil = only_segment(segment, flip_bit(offset))

    again, by_tier = engine.ask(tokens)

    assert again == answer
    assert by_tier["cpu"] == loaded_blocks * BLOCK
    assert sum(by_tier.values()) == LENGTH
    assert engine.port.bad == [reason]
    assert engine.transfer.counters.mismatches[reason] == counted + 1
    assert set(engine.port.segments) == before, "the segment that was refused is stored anew"
    engine.clear_device()
    assert engine.ask(tokens)[0] == answer
    assert engine.port.bad == [reason], "what was stored anew is good"


def test_a_segment_that_is_cut_short_is_refused(engine: LiveEngine, stored: tuple[list[int], list[int]]) -> None:
    tokens, answer = stored
    engine.port.spoil = only_segment(1, lambda sealed: sealed[:-4])

    again, by_tier = engine.ask(tokens)

    assert (again, by_tier["cpu"], engine.port.bad) == (answer, 4 * BLOCK, ["truncated"])


def test_after_a_missing_segment_the_rest_is_recomputed(
    engine: LiveEngine, stored: tuple[list[int], list[int]]
) -> None:
    tokens, answer = stored
    engine.port.spoil = only_segment(2, lambda sealed: None)

    again, by_tier = engine.ask(tokens)

    assert again == answer
    assert by_tier == {"device": 0, "cpu": 8 * BLOCK, "redis": 0, "recomputed": LENGTH - 8 * BLOCK}
    assert engine.port.bad == []


def test_a_load_that_raises_is_recomputed(engine: LiveEngine, stored: tuple[list[int], list[int]]) -> None:
    tokens, answer = stored

    def refuse(sealed: bytes) -> bytes:
        raise OSError("the tier is gone")

    engine.port.spoil = only_segment(1, refuse)

    again, by_tier = engine.ask(tokens)

    assert (again, by_tier["recomputed"]) == (answer, LENGTH)


def test_a_load_that_fails_wholly_is_not_tried_again(engine: LiveEngine, stored: tuple[list[int], list[int]]) -> None:
    tokens, answer = stored
    failed = engine.transfer.counters.loads_failed
    engine.port.spoil = lambda sealed: None

    again, by_tier = engine.ask(tokens)

    assert (again, by_tier["recomputed"]) == (answer, LENGTH)
    assert engine.port.fetches == 1
    assert engine.transfer.counters.loads_failed == failed + 1


class BlockedFetch:
    """Stops every fetch of a port until `release`."""

    def __init__(self, engine: LiveEngine) -> None:
        self._reached, self._gate = threading.Event(), threading.Event()
        engine.port.before_fetch = self._wait

    def _wait(self) -> None:
        self._reached.set()
        assert self._gate.wait(patience(PATIENCE_S))

    def reached(self) -> None:
        assert self._reached.wait(patience(PATIENCE_S))

    def release(self) -> None:
        self._gate.set()


@pytest.fixture
def blocked(engine: LiveEngine, stored: tuple[list[int], list[int]]) -> Iterator[BlockedFetch]:
    fetch = BlockedFetch(engine)
    yield fetch
    fetch.release()


def test_other_requests_finish_while_a_load_waits(
    engine: LiveEngine, stored: tuple[list[int], list[int]], blocked: BlockedFetch
) -> None:
    tokens, answer = stored
    waiting = engine.start(engine.answer(tokens, greedy(8)))
    blocked.reached()

    other = engine.run(engine.answer(prompt(50, 200), greedy(20), planned=False))

    assert len(other.outputs[0].token_ids) == 20
    assert not waiting.done()
    blocked.release()
    output = waiting.result(patience(PATIENCE_S))
    assert list(output.outputs[0].token_ids) == answer
    assert usage(output)["cpu"] == 15 * BLOCK


def test_a_request_aborted_while_it_loads_keeps_its_blocks_until_the_load_ends(
    engine: LiveEngine, stored: tuple[list[int], list[int]], blocked: BlockedFetch
) -> None:
    tokens, answer = stored
    released = list(engine.port.released)
    waiting = engine.start(engine.answer(tokens, greedy(8)))
    blocked.reached()

    waiting.cancel()
    until(lambda: engine.llm.get_num_unfinished_requests() == 0, "vLLM's front has dropped the request")
    until(lambda: engine.on_engine_thread(engine.scheduler.get_num_unfinished_requests) == 0, "the engine too")

    assert engine.blocks_in_use() >= 15, "the load still writes into them"
    assert engine.port.released == released
    blocked.release()
    until(lambda: engine.blocks_in_use() == 0, "the aborted request's blocks are free")
    until(lambda: engine.port.released == [*released, LEASE_ID], "its lease is given back")
    assert engine.ask(tokens)[0] == answer


def test_a_tiny_pool_preempts_and_stays_exact(engine: LiveEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [prompt(700 + number, 200) for number in range(5)]
    alone = [engine.ask(tokens, max_tokens=60)[0] for tokens in prompts]
    engine.clear_device()
    preempted = 0
    finished = engine.scheduler.connector.request_finished

    def count(request: Any, block_ids: list[int]) -> Any:
        nonlocal preempted
        preempted += request.num_preemptions
        return finished(request, block_ids)

    monkeypatch.setattr(engine.scheduler.connector, "request_finished", count)
    pool = engine.scheduler.kv_cache_manager.block_pool
    taken = engine.on_engine_thread(lambda: pool.get_new_blocks(70))  # 29 are left, and 5 x 9 are needed

    async def together() -> list[list[int]]:
        outputs = await asyncio.gather(*(engine.answer(tokens, greedy(60)) for tokens in prompts))
        return [list(output.outputs[0].token_ids) for output in outputs]

    try:
        answers = engine.run(together())
        engine.settle()
        assert engine.blocks_in_use() == len(taken)
    finally:
        engine.on_engine_thread(lambda: pool.free_blocks(taken))

    assert preempted > 0
    assert answers == alone


def test_a_slow_save_stores_what_was_computed_although_the_pool_is_reused(engine: LiveEngine) -> None:
    tokens = prompt(55, 400)
    engine.ask(tokens)
    original = engine.port.segments
    engine.clear_device()
    gate = threading.Event()
    engine.port = MemoryPort()
    engine.port.before_offer = lambda: gate.wait(patience(PATIENCE_S))

    engine.run(engine.answer(tokens, greedy(8), planned=False))
    for seed in range(56, 64):  # 128 blocks, more than the pool has
        engine.run(engine.answer(prompt(seed, LENGTH), greedy(2), planned=False))
    held = engine.blocks_in_use()
    gate.set()
    engine.settle()

    assert held >= 12
    assert {key: engine.port.segments[key] for key in original} == original


def test_refused_offers_are_counted_and_hold_nothing(engine: LiveEngine) -> None:
    engine.port.refuse_offers = True
    dropped = engine.transfer.counters.saves_dropped

    engine.ask(prompt(51, LENGTH))

    assert engine.port.segments == {}
    assert engine.transfer.counters.saves_dropped == dropped + 4
    assert engine.blocks_in_use() == 0


def test_a_store_that_raises_does_not_end_saving(engine: LiveEngine) -> None:
    def refuse(key: bytes) -> None:
        raise OSError("the tier is gone")

    engine.port.on_store = refuse
    engine.ask(prompt(52, 200))
    assert engine.port.segments == {}

    engine.port.on_store = lambda key: None
    engine.ask(prompt(53, 200))
    assert len(engine.port.segments) == 2


def test_saves_beyond_the_limit_of_held_blocks_are_dropped_and_each_segment_counted_once(
    engine: LiveEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    dropped = engine.transfer.counters.saves_dropped
    tokens = prompt(54, LENGTH)
    gate = threading.Event()
    engine.port.before_offer = lambda: gate.wait(patience(PATIENCE_S)) and None
    with monkeypatch.context() as patched:
        patched.setattr(engine.transfer, "_max_held_blocks", 2)
        engine.run(engine.answer(tokens, greedy(4)))
        assert engine.transfer.counters.saves_dropped == dropped + 3
    gate.set()
    engine.settle()
    assert len(engine.port.segments) == 1, "a segment that is larger than the limit goes alone"
    assert engine.transfer.counters.saves_dropped == dropped + 3

    engine.ask(tokens, max_tokens=4)
    assert len(engine.port.segments) == 4
