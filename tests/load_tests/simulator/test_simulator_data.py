"""A slice of the published conversation trace, against a model of LRU that shares no line with the manager."""

from collections import OrderedDict
from pathlib import Path

import pytest

from load_tests.simulator.costs import Costs
from load_tests.simulator.one_replica.replay import Setup, replay
from load_tests.simulator.trace import read_trace

ROOT = Path(__file__).parents[3]
NAME = "conversation_trace.jsonl"
FILES = [folder / "shared" / "data" / NAME for folder in (ROOT, ROOT.parent)]
REQUESTS = 2000


@pytest.fixture(scope="module")
def conversations():
    file = next((file for file in FILES if file.exists()), None)
    if file is None:
        pytest.skip(f"{NAME} is in no shared/data folder in or beside the repository")
    return read_trace(file, REQUESTS)


def lru_hits(prompts, capacity):
    """Blocks found by an LRU cache of blocks. A prompt's first block counts as used last, so its end leaves first."""
    cache = OrderedDict()
    hits = 0
    for prompt in prompts:
        hits += next((n for n, block in enumerate(prompt) if block not in cache), len(prompt))
        for block in reversed(prompt):
            if block in cache:
                cache.move_to_end(block)
        for block in prompt:
            if block in cache:
                continue
            if len(cache) == capacity:
                if next(iter(cache)) in prompt:
                    break  # it begins with all that the cache holds
                cache.popitem(last=False)
            cache[block] = None
        for block in reversed(prompt):
            if block in cache:
                cache.move_to_end(block)
    return hits


@pytest.mark.parametrize("capacity", [300, 5859])
def test_lru_finds_exactly_the_blocks_that_a_model_of_lru_finds(conversations, capacity):
    tally = replay(conversations, Setup("lru", capacity), Costs())
    assert tally.blocks == sum(len(request.hash_ids) for request in conversations) == 54_559
    assert tally.cpu_blocks == lru_hits([request.hash_ids for request in conversations], capacity)


def test_a_tier_that_holds_everything_finds_all_that_recurs(conversations):
    seen: set[int] = set()
    recurring = 0
    for request in conversations:
        recurring += sum(block in seen for block in request.hash_ids)
        seen.update(request.hash_ids)
    tally = replay(conversations, Setup("lfu", 10**6), Costs())
    assert tally.cpu_blocks == recurring
    assert tally.evicted_blocks == 0
