import pytest

from load_tests.simulator.cluster.device_pool import DevicePool
from load_tests.simulator.cluster.replay import chosen_rate_scale, simulate
from load_tests.simulator.cluster.report import coefficient_of_variation, percentile
from load_tests.simulator.cluster.routers import router_names
from load_tests.simulator.costs import Costs
from load_tests.simulator.synthetic import cold_burst, hot_prefix, uniform_sessions
from load_tests.simulator.trace import BLOCK_TOKENS, TraceRequest, block_key

COSTS = Costs()


def request(time_s, *ids, output=50):
    return TraceRequest(time_s, len(ids) * BLOCK_TOKENS, output, ids)


def run(trace, router="ours", replicas=8, device=400, cpu=2000, **options):
    options = {"rate_scale": 1.0, **options}
    return simulate(trace, replicas, router, device, cpu, COSTS, seed=1, **options)


def blocks(*ids):
    return [block_key(n) for n in ids]


def test_tokens_are_counted_at_the_tier_they_came_from_and_add_up():
    trace = [request(0, 1, 2, 3, 4), request(10, 1, 2, 3, 4, 5), request(20, 1, 2, 9)]
    report = run(trace, "round-robin", replicas=2)
    assert report["hit_tokens_by_tier"] == {"device": 2 * BLOCK_TOKENS, "cpu": 4 * BLOCK_TOKENS, "redis": 0}
    assert report["recomputed_tokens"] == 6 * BLOCK_TOKENS
    assert report["prompt_tokens"] == sum(r.input_tokens for r in trace)


def test_one_token_is_computed_of_a_prompt_that_is_all_there():
    report = run([request(0, 1, 2), request(10, 1, 2)], replicas=1)
    assert report["recomputed_tokens"] == 2 * BLOCK_TOKENS + 1


def test_what_the_cpu_tier_has_no_room_for_comes_from_redis():
    trace = [request(0, 1, 2), request(10, 3, 4), request(20, 3, 4), request(30, 1, 2, 5)]
    report = run(trace, "round-robin", replicas=1, device=4, cpu=2, redis_blocks=10, policy="lru")
    assert report["hit_tokens_by_tier"]["redis"] == BLOCK_TOKENS, "the other is the last that the pool had to evict"
    assert report["demoted_bytes"] > 0


def test_the_first_token_waits_for_the_queue_the_load_and_the_prefill():
    prefill = COSTS.prefill_s(2 * BLOCK_TOKENS)
    alone = run([request(0, 1, 2)], replicas=1)["ttft_s"]
    assert alone["mean"] == pytest.approx(prefill)
    queued = run([request(0, 1, 2), request(0, 3, 4)], replicas=1)["ttft_s"]
    assert queued["p99"] == pytest.approx(2 * prefill)
    loaded = run([request(0, 1, 2), request(10, 1, 2, 3)], "round-robin", replicas=2)["ttft_s"]
    load = COSTS.cpu_latency_s + 2 * BLOCK_TOKENS * COSTS.kv_bytes_per_token / COSTS.cpu_bytes_per_s
    assert loaded["p50"] == pytest.approx(load + COSTS.prefill_s(BLOCK_TOKENS))


def test_a_full_pool_holds_up_the_queue_until_a_request_ends():
    report = run([request(0, 1, 2), request(0, 3, 4)], replicas=1, device=4)
    decode = 50 * COSTS.decode_s_per_token
    assert report["ttft_s"]["p99"] == pytest.approx(2 * COSTS.prefill_s(2 * BLOCK_TOKENS) + decode)


def test_a_request_larger_than_a_pool_is_refused_in_one_sentence():
    with pytest.raises(ValueError, match="request 0 needs 4 blocks, a device pool has 3"):
        run([request(0, 1, 2, 3)], device=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"router": "best"}, "unknown router"), ({"rate_scale": 0.0}, "rate_scale"), ({"replicas": 0}, "replica")],
)
def test_what_cannot_work_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        run([request(0, 1)], **options)
    with pytest.raises(ValueError, match="without requests"):
        run([])


@pytest.mark.parametrize("router", router_names())
def test_the_same_arguments_give_the_same_figures_and_every_request_is_served(router):
    trace = hot_prefix(3, requests=80)
    first, second = run(trace, router), run(trace, router)
    assert first == second
    assert first["requests"] == len(trace)
    assert sum(first["load_tokens"]) == first["recomputed_tokens"]


def test_a_mirror_that_lags_for_long_makes_affinity_blind():
    trace = uniform_sessions(1, sessions=20, turns=4, think_s=20.0)
    fresh = run(trace, "pure-affinity", mirror_lag_s=0.0)
    blind = run(trace, "pure-affinity", mirror_lag_s=1e6)
    assert fresh["hit_tokens_by_tier"]["device"] > 2 * blind["hit_tokens_by_tier"]["device"]


def test_the_chosen_rate_leaves_a_third_idle_when_all_that_recurs_is_reused():
    trace = uniform_sessions(1, sessions=40, turns=5)
    report = run(trace, "ours", rate_scale=None)
    busy_s = COSTS.prefill_s(report["recomputed_tokens"])
    assert busy_s / report["duration_s"] / 8 == pytest.approx(0.65, abs=0.12)
    assert report["rate_scale"] == chosen_rate_scale(trace, 8, COSTS)


def test_a_cold_burst_is_shared_out_evenly():
    trace = cold_burst(1, before=0)
    loads = run(trace, "ours")["load_tokens"]
    assert max(loads) - min(loads) <= max(r.input_tokens for r in trace)


def test_a_hot_prefix_is_served_by_many_replicas_and_computed_by_few():
    trace = hot_prefix(1, requests=400)
    # No CPU tier: what is not on a device must be moved, or computed again.
    ours, pure = (run(trace, name, cpu=0, rate_scale=None) for name in ("ours", "pure-affinity"))
    assert ours["hit_tokens"] >= 0.97 * pure["hit_tokens"]
    assert ours["load_cov"] <= 0.1
    assert ours["ttft_s"]["p99"] < pure["ttft_s"]["p99"]
    assert ours["moves"] > 0


def test_ours_keeps_conversations_together_without_herding_them():
    trace = uniform_sessions(1, sessions=80, turns=6)
    known_before = sum(len(r.hash_ids) for r in trace) - len({block for r in trace for block in r.hash_ids})
    ours, power_of_two = (run(trace, name, rate_scale=None) for name in ("ours", "power-of-two"))
    assert ours["hit_tokens_by_tier"]["device"] >= 0.9 * known_before * BLOCK_TOKENS
    assert power_of_two["hit_tokens_by_tier"]["device"] < 0.5 * known_before * BLOCK_TOKENS
    assert ours["load_cov"] <= 1.2 * power_of_two["load_cov"]


def test_a_pool_evicts_the_last_block_of_what_was_freed_first():
    pool = DevicePool(4)
    first = pool.acquire(blocks(1, 2), 0, 0)
    pool.publish(first, blocks(1, 2))
    second = pool.acquire(blocks(3), 0, 0)
    pool.publish(second, blocks(3))
    pool.release(first)
    pool.release(second)
    assert pool.acquire(blocks(7, 8), 0, 0) is not None
    assert pool.take_evicted() == blocks(2)
    assert pool.leading_blocks(blocks(1, 2)) == 1


def test_a_pool_refuses_what_running_requests_leave_no_room_for():
    pool = DevicePool(4)
    held = pool.acquire(blocks(1, 2), 0, 1)
    assert pool.acquire(blocks(3, 4), 0, 0) is None
    pool.publish(held, blocks(1, 2))
    assert pool.acquire(blocks(1, 2), 2, 2) is None, "its own blocks are no room for it"
    assert pool.acquire(blocks(1, 2), 2, 1) is not None
    assert pool.bring(blocks(5)) == []


def test_a_pool_keeps_a_block_that_two_requests_computed_once():
    pool = DevicePool(4)
    one, two = pool.acquire(blocks(1), 0, 0), pool.acquire(blocks(1), 0, 0)
    assert pool.publish(one, blocks(1)) == blocks(1)
    assert pool.publish(two, blocks(1)) == []
    pool.release(one)
    pool.release(two)
    assert pool.bring(blocks(2, 3, 4)) == blocks(2, 3, 4)
    assert pool.take_evicted() == []


def test_figures_of_load_and_time():
    assert coefficient_of_variation([2, 4]) == pytest.approx(1 / 3)
    assert coefficient_of_variation([0, 0]) == 0
    assert [percentile([1, 2, 3, 4], share) for share in (0.5, 0.51, 0.99, 1.0)] == [2, 3, 4, 4]
