"""What a replay comes to: plain numbers, with the same names for one replica and for many (docs/tools/simulator.md)."""

from collections.abc import Callable, Sequence
from typing import Any

from load_tests.simulator.cluster.replay import simulate
from load_tests.simulator.costs import Costs
from load_tests.simulator.one_replica.replay import Setup, Tally, replay
from load_tests.simulator.trace import BLOCK_TOKENS, TraceRequest

Figures = dict[str, Any]


def run_setup(trace: Sequence[TraceRequest], setup: Setup, costs: Costs, progress: Callable[[int], None]) -> Figures:
    """Replay a trace on one replica, or on several behind a router."""
    if setup.router is None:
        return of_one_replica(replay(trace, setup, costs, progress), costs)
    report = simulate(
        trace,
        setup.replicas,
        setup.router,
        setup.device_blocks,
        setup.capacity_blocks,
        costs,
        setup.seed,
        policy=setup.policy,
        redis_blocks=setup.redis_blocks,
        rate_scale=setup.rate_scale,
        on_progress=progress,
    )
    return {"blocks": sum(len(request.hash_ids) for request in trace), **of_cluster(report, costs)}


def of_one_replica(tally: Tally, costs: Costs) -> Figures:
    """Return the figures of `load_tests.simulator.one_replica.replay`."""
    found = {"device": tally.device_blocks, "cpu": tally.cpu_blocks, "redis": tally.redis_blocks}
    hit_blocks = sum(found.values())
    block_bytes = BLOCK_TOKENS * costs.kv_bytes_per_token
    return {
        "requests": tally.requests,
        "blocks": tally.blocks,
        "hit_blocks": hit_blocks,
        "hit_rate": hit_blocks / tally.blocks,
        "hit_rate_by_tier": {tier: blocks / tally.blocks for tier, blocks in found.items()},
        "evicted_blocks": tally.evicted_blocks,
        "tokens": {
            "input": tally.input_tokens,
            "device": tally.device_tokens,
            "cpu": tally.cpu_tokens,
            "redis": tally.redis_tokens,
            "recomputed": tally.recomputed_tokens,
        },
        "bytes_moved": {
            "device_to_cpu": tally.saved_blocks * block_bytes,
            "cpu_to_device": (tally.cpu_blocks + tally.redis_blocks) * block_bytes,
            "cpu_to_redis": tally.demoted_blocks * block_bytes,
            "redis_to_cpu": tally.redis_blocks * block_bytes,
            "device_to_device": 0,
        },
        "ttft_s": _distribution(tally.ttft_s),
        "load": None,
    }


def of_cluster(report: dict[str, Any], costs: Costs) -> Figures:
    """Return the figures of `load_tests.simulator.cluster`, whose hit rates are shares of tokens, not of blocks."""
    tokens = report["hit_tokens_by_tier"]
    loaded = {tier: tokens[tier] * costs.kv_bytes_per_token for tier in ("cpu", "redis")}
    return {
        "requests": report["requests"],
        "hit_blocks": None,
        "hit_rate": report["hit_rate"],
        "hit_rate_by_tier": {tier: found / report["prompt_tokens"] for tier, found in tokens.items()},
        "evicted_blocks": None,
        "tokens": {"input": report["prompt_tokens"], **tokens, "recomputed": report["recomputed_tokens"]},
        "bytes_moved": {
            "device_to_cpu": report["saved_bytes"],
            "cpu_to_device": loaded["cpu"] + loaded["redis"],
            "cpu_to_redis": report["demoted_bytes"],
            "redis_to_cpu": loaded["redis"],
            "device_to_device": report["moved_bytes"],
        },
        "ttft_s": report["ttft_s"],
        "load": {
            "cov": report["load_cov"],
            "window_cov": report["window_load_cov"],
            "worst_queue": report["worst_queue"],
            "moves": report["moves"],
            "tokens": report["load_tokens"],
            "duration_s": report["duration_s"],
            "rate_scale": report["rate_scale"],
        },
    }


def _distribution(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    last = len(ordered) - 1
    return {
        "mean": sum(ordered) / len(ordered),
        **{f"p{share}": ordered[round(last * share / 100)] for share in (50, 90, 99)},
    }
