"""Counts of the simulator on traces small enough to count by hand. A letter is a block of 512 tokens."""

import json
import math
import random
from itertools import combinations
from pathlib import Path

import pytest

from kvmanager.index.eviction_policy import EvictionPolicy
from kvmanager.index.locations import Tier
from load_tests.simulator.costs import Costs, CostsError
from load_tests.simulator.figures import of_one_replica
from load_tests.simulator.one_replica.oracle import NextUses
from load_tests.simulator.one_replica.replay import Setup, replay
from load_tests.simulator.trace import BLOCK_TOKENS, TraceRequest, block_key

COSTS = Costs(
    prefill_tokens_per_s=1000,
    kv_bytes_per_token=10,
    cpu_latency_s=0.5,
    cpu_bytes_per_s=5120,
    redis_latency_s=2.0,
    redis_bytes_per_s=2560,
)
BLOCK_BYTES = 10 * BLOCK_TOKENS


class Oldest(EvictionPolicy):
    """Evicts what was used longest ago, for whatever comes: counts that nobody's tuning changes."""

    def __init__(self, setting):
        super().__init__(setting)
        self.exposed = set()
        self.last_use = {}

    def stored(self, copy):
        self.last_use[copy] = self.setting.clock.now

    def used(self, copy):
        self.last_use[copy] = self.setting.clock.now

    def expose(self, copy):
        self.exposed.add(copy)

    def shield(self, copy):
        self.exposed.remove(copy)

    def victim(self):
        return min(self.exposed, key=self.last_use.__getitem__, default=None)

    def admits(self, newcomer, victim):
        return True


OLDEST = f"{__name__}:Oldest"


def trace_of(prompts):
    """Return requests, one a second, for prompts given as words of which each prefix is a block."""
    names = {}
    trace = []
    for second, prompt in enumerate(prompts):
        ids = tuple(names.setdefault(prompt[:end], len(names)) for end in range(1, len(prompt) + 1))
        trace.append(TraceRequest(float(second), len(prompt) * BLOCK_TOKENS, 10, ids))
    return trace


def run(prompts, capacity, progress=lambda done: None, policy=OLDEST, **setup):
    """Replay prompts; return the tally."""
    return replay(trace_of(prompts), Setup(policy, capacity, **setup), COSTS, progress)


def found(prompts, capacity, **setup):
    """Return the blocks found by the last prompt, at device, CPU tier and Redis."""
    after, before = run(prompts, capacity, **setup), run(prompts[:-1], capacity, **setup)
    return (
        after.device_blocks - before.device_blocks,
        after.cpu_blocks - before.cpu_blocks,
        after.redis_blocks - before.redis_blocks,
    )


class TestOneTier:
    def test_a_new_prompt_finds_nothing_and_its_repetition_everything(self):
        assert found(["abc"], 10) == (0, 0, 0)
        assert found(["abc", "abc"], 10) == (0, 3, 0)

    def test_prompts_share_their_common_beginning_and_nothing_after_it(self):
        assert found(["abcd", "abxd"], 10) == (0, 2, 0)
        assert found(["abc", "xbc"], 10) == (0, 0, 0)

    def test_the_last_blocks_of_a_prefix_are_evicted_first(self):
        # Four blocks for abc and x: x takes the place of nothing; y and z those of c and b.
        assert found(["abc", "x", "abc"], 4) == (0, 3, 0)
        assert found(["abc", "x", "y", "abc"], 4) == (0, 2, 0)
        assert found(["abc", "x", "y", "z", "abc"], 4) == (0, 1, 0)

    def test_the_policy_decides_what_goes(self):
        prompts = ["a", "a", "a", "b", "c", "a"]
        assert found(prompts, 2, policy="lfu") == (0, 1, 0)
        assert found(prompts, 2) == (0, 0, 0)

    def test_a_prompt_larger_than_the_tier_keeps_its_beginning(self):
        assert found(["abcde", "abcde"], 3) == (0, 3, 0)

    def test_what_a_request_has_loaded_may_be_evicted_after_it(self):
        assert found([*["ab"] * 2, *["xy"] * 4], 2) == (0, 2, 0)

    def test_counts_are_sums_over_all_requests(self):
        tally = run(["abc", "abd", "x", "abc"], 10)
        assert (tally.requests, tally.blocks, tally.cpu_blocks) == (4, 10, 5)
        assert (tally.saved_blocks, tally.evicted_blocks) == (5, 0)
        assert tally.input_tokens == 10 * BLOCK_TOKENS
        tally = run(["abc", "x", "y"], 3)
        assert (tally.saved_blocks, tally.evicted_blocks) == (5, 2)

    def test_progress_hears_of_the_end(self):
        heard = []
        run(["a"] * 100, 3, heard.append)
        assert heard[0] == 0
        assert heard[-1] == 100
        assert heard == sorted(heard)


class TestThreeTiers:
    def test_a_block_is_counted_at_the_fastest_tier_that_has_it(self):
        # The device holds one prompt of three blocks, the CPU tier two prompts.
        assert found(["abc", "abc"], 6, device_blocks=3) == (3, 0, 0)
        assert found(["abc", "xyz", "abc"], 6, device_blocks=3) == (0, 3, 0)
        assert found(["abc", "xy", "abc"], 6, device_blocks=3) == (1, 2, 0)

    def test_the_device_keeps_what_is_hot_over_what_is_recent(self):
        hot = ["ab"] * 3
        assert found([*hot, "w", "x", "y", "z", "ab"], 10, device_blocks=5) == (2, 0, 0)
        assert found([*hot, "xyz", "ab"], 10, device_blocks=3) == (0, 2, 0)  # a prompt needs its room all the same

    def test_a_prompt_larger_than_the_device_keeps_its_beginning_there(self):
        assert found(["abcde", "abcde"], 10, device_blocks=3) == (3, 2, 0)

    def test_redis_has_what_the_cpu_tier_lost(self):
        prompts = ["abc", "uvw", "xyz", "abc"]
        assert sum(found(prompts, 3)) == 0
        assert sum(found(prompts, 3, redis_blocks=20)) == 3
        assert found(prompts, 3, redis_blocks=20)[2] > 0

    def test_what_came_from_redis_is_in_the_cpu_tier_again(self):
        prompts = ["abc", "uvw", "xyz", "abc"]
        assert found([*prompts, "abc"], 4, redis_blocks=20) == (0, 3, 0)

    def test_copies_to_redis_and_promotions_are_counted(self):
        tally = run(["abc", "uvw", "xyz", "abc"], 3, redis_blocks=20)
        assert tally.demoted_blocks == 9
        assert tally.promoted_blocks > 0
        assert run(["abc", "uvw", "xyz", "abc"], 3).demoted_blocks == 0


def most_hits(prompts, capacity):
    """Blocks that the best of all caches finds: after each prompt it keeps any whole chains of what it had and got."""
    best = {frozenset(): 0}
    for prompt in prompts:
        blocks = [prompt[:end] for end in range(1, len(prompt) + 1)]
        after = {}
        for kept, hits in best.items():
            found = hits + sum(block in kept for block in blocks)
            at_hand = sorted(kept.union(blocks))
            for size in range(min(capacity, len(at_hand)) + 1):
                for choice in map(frozenset, combinations(at_hand, size)):
                    if all(len(block) == 1 or block[:-1] in choice for block in choice):
                        after[choice] = max(found, after.get(choice, 0))
        best = after
    return max(best.values())


class TestBelady:
    def test_the_future_of_a_block_is_its_next_request(self):
        trace = trace_of(["ab", "a", "ac", "ab"])
        future = NextUses(trace)
        a, b, c = (block_key(number) for number in (0, 1, 2))
        seen = []
        for number in range(4):
            future.serve(number)
            seen.append((future.next_use(a), future.next_use(b), future.next_use(c)))
        never = math.inf
        assert seen == [(1, 3, never), (2, 3, never), (3, 3, never), (never, never, never)]

    def test_what_is_used_again_last_goes_first_and_what_never_is_does_not_come_in(self):
        assert found(["a", "b", "x", "b", "a"], 2, policy="belady") == (0, 1, 0)
        assert run(["a", "b", "x", "b", "a"], 2, policy="belady").cpu_blocks == 2
        assert run(["a", "b", "x", "b", "a"], 1, policy="belady").cpu_blocks == 1

    def test_a_use_on_the_device_is_a_use(self):
        assert found(["b", "a", "a", "x", "x", "b"], 2, policy="belady", device_blocks=1) == (0, 1, 0)

    @pytest.mark.parametrize("seed", range(12))
    def test_it_finds_as_much_as_any_cache_can(self, seed):
        rng = random.Random(seed)
        prompts = ["".join(rng.choice("ab") for _ in range(rng.randint(1, 3))) for _ in range(9)]
        for capacity in (1, 2, 3):
            best = most_hits(prompts, capacity)
            assert run(prompts, capacity, policy="belady").cpu_blocks == best
            assert run(prompts, capacity).cpu_blocks <= best
            assert run(prompts, capacity, policy="lfu").cpu_blocks <= best


class TestTokensAndTimes:
    def test_the_last_token_of_a_prompt_is_computed_though_all_of_it_is_stored(self):
        tally = run(["ab", "ab"], 10)
        assert tally.cpu_tokens == 2 * BLOCK_TOKENS - 1
        assert tally.recomputed_tokens == 2 * BLOCK_TOKENS + 1

    def test_tokens_by_tier_and_recomputed_ones_add_up(self):
        tally = run(["abc", "uvw", "xyz", "abc", "abcd", "ab"], 4, device_blocks=2, redis_blocks=9)
        parts = (tally.device_tokens, tally.cpu_tokens, tally.redis_tokens, tally.recomputed_tokens)
        assert sum(parts) == tally.input_tokens
        assert all(parts)

    def test_a_block_partly_filled_has_the_tokens_of_the_prompt(self):
        trace = [TraceRequest(0, 600, 0, (0, 1)), TraceRequest(1, 900, 0, (0, 1))]
        tally = replay(trace, Setup(OLDEST, 10), COSTS)
        assert tally.cpu_tokens == 899
        trace = [TraceRequest(0, 2000, 0, (0, 1)), TraceRequest(1, 2000, 0, (0, 1))]
        assert replay(trace, Setup(OLDEST, 10), COSTS).cpu_tokens == 2 * BLOCK_TOKENS

    def test_the_first_token_comes_when_all_is_loaded_and_the_rest_computed(self):
        cold, warm = run(["ab", "abc"], 10).ttft_s
        assert cold == pytest.approx(1.024)
        assert warm == pytest.approx(0.5 + 2.0 + 0.512)

    def test_a_load_from_redis_goes_through_host_memory(self):
        assert COSTS.load_s(Tier.DEVICE, 512) == 0
        assert COSTS.load_s(Tier.CPU, 512) == pytest.approx(0.5 + 1)
        assert COSTS.load_s(Tier.REDIS, 512) == pytest.approx(0.5 + 1 + 2 + 2)
        assert COSTS.load_s(Tier.REDIS, 0) == 0

    def test_figures_are_shares_of_blocks_and_bytes_of_whole_blocks(self):
        figures = of_one_replica(run(["ab", "ab", "cd", "ab"], 10, device_blocks=2), COSTS)
        assert figures["hit_rate"] == 4 / 8
        assert figures["hit_rate_by_tier"] == {"device": 2 / 8, "cpu": 2 / 8, "redis": 0}
        assert figures["bytes_moved"]["device_to_cpu"] == 4 * BLOCK_BYTES
        assert figures["bytes_moved"]["cpu_to_device"] == 2 * BLOCK_BYTES

    def test_percentiles_are_of_the_requests(self):
        times = of_one_replica(run(["a" * length for length in range(1, 102)], 1), COSTS)["ttft_s"]
        by_length = sorted(run(["a" * length for length in range(1, 102)], 1).ttft_s)
        assert times["p50"] == by_length[50]
        assert times["p90"] == by_length[90]
        assert times["p99"] == by_length[99]
        assert times["mean"] == pytest.approx(sum(by_length) / 101)


class TestCosts:
    def test_a_file_replaces_the_costs_that_it_names(self, tmp_path):
        file = tmp_path / "costs.json"
        file.write_text(json.dumps({"prefill_tokens_per_s": 5, "model": "mine"}))
        costs = Costs.from_file(file)
        assert (costs.prefill_tokens_per_s, costs.model) == (5, "mine")
        assert costs.redis_bytes_per_s == Costs().redis_bytes_per_s

    @pytest.mark.parametrize(
        ("text", "complaint"),
        [
            ("{", "is not JSON"),
            ("[]", "is not a JSON object"),
            ('{"speed": 1}', "has no use for speed; costs are model, prefill_tokens_per_s"),
            ('{"prefill_tokens_per_s": 0}', "prefill_tokens_per_s must be a positive number, got 0"),
            ('{"prefill_tokens_per_s": true}', "prefill_tokens_per_s must be a positive number, got True"),
            ('{"cpu_latency_s": -1}', "cpu_latency_s must be a number from 0 on, got -1"),
            ('{"cpu_bytes_per_s": "1"}', "cpu_bytes_per_s must be a positive number, got '1'"),
            ('{"redis_bytes_per_s": NaN}', "redis_bytes_per_s must be a positive number, got nan"),
            ('{"kv_bytes_per_token": 0.5}', "kv_bytes_per_token must be a whole number of bytes, got 0.5"),
            ('{"model": 3}', "model must be a text, got 3"),
        ],
    )
    def test_costs_that_cannot_be_are_refused_in_one_sentence(self, tmp_path, text, complaint):
        file = tmp_path / "costs.json"
        file.write_text(text)
        with pytest.raises(CostsError) as caught:
            Costs.from_file(file)
        assert str(caught.value).startswith(str(file))
        assert complaint in str(caught.value)
        assert str(caught.value).endswith(".")

    def test_a_file_that_is_not_there_is_named(self):
        with pytest.raises(CostsError, match=r"none.json cannot be read"):
            Costs.from_file(Path("none.json"))

    def test_a_tier_may_have_no_latency(self):
        assert Costs(cpu_latency_s=0).load_s(Tier.CPU, 1) > 0
