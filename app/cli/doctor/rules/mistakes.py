"""Mistakes that are seen in the settings alone, without any traffic."""

from __future__ import annotations

from app.cli.doctor.advice import Advice, Severity
from app.cli.doctor.figures import Figures
from app.cli.doctor.room import MIB, cpu_tier_within, replicas_fit

_ON_CPU = "docs/guide/settings.md#engine"


def cpu_tier_below_device_pool(figures: Figures) -> Advice | None:
    """The CPU tier is smaller than the devices of its node: it cannot hold what they do, and Redis gets it late."""
    setup, traffic = figures.setup, figures.traffic
    if setup is None or not setup.kv_enabled or not setup.cpu_tier_bytes or not setup.replicas:
        return None
    pool = traffic.device_pool_bytes
    if pool is None and setup.device_blocks and setup.block_tokens and setup.kv_bytes_per_token:
        pool = setup.device_blocks * setup.block_tokens * setup.kv_bytes_per_token
    if pool is None:
        return None
    of_a_node = -(-setup.replicas // traffic.nodes) * pool
    larger = cpu_tier_within(figures, _round_up(of_a_node))
    if setup.cpu_tier_bytes >= of_a_node or larger is None:
        return None
    return Advice(
        "cpu-tier-below-device-pool",
        Severity.WARNING,
        f"kv.cpu_tier_bytes is {setup.cpu_tier_bytes}; the device pools of a node hold {of_a_node} bytes",
        "kv.cpu_tier_bytes",
        str(larger),
        "KV is shared, and reaches Redis, through the CPU tier. A smaller one loses what the devices still have.",
        "docs/concepts/eviction.md#between-the-tiers",
    )


def slow_dtype(figures: Figures) -> Advice | None:
    """float32 where the processor computes bfloat16, or bfloat16 where it only emulates that."""
    setup = figures.setup
    if setup is None or setup.accelerator != "cpu" or {setup.dtype, setup.cpu_dtype} != {"float32", "bfloat16"}:
        return None
    native = setup.cpu_dtype == "bfloat16"
    if not replicas_fit(figures, str(setup.cpu_dtype)):
        return None
    why = (
        "This processor has instructions for bfloat16: it computes faster, and KV takes half the room."
        if native
        else "This processor has no instructions for bfloat16: it is emulated, and several times slower than float32."
    )
    return Advice(
        "slow-dtype",
        Severity.WARNING,
        f"dtype is {setup.dtype}; this processor computes {setup.cpu_dtype} fast",
        "dtype",
        "auto",
        f"{why} Stored KV is of one type, so the cache starts cold.",
        "docs/guide/redis.md#what-makes-the-cache-cold",
    )


def more_threads_than_cores(figures: Figures) -> Advice | None:
    """All replicas' threads together are more than the cores: they wait for each other, spinning."""
    setup = figures.setup
    if setup is None or setup.accelerator != "cpu" or not (setup.threads and setup.replicas and setup.cores):
        return None
    cores = setup.cores * figures.traffic.nodes
    each = setup.threads * setup.ranks
    if each * setup.replicas <= cores:
        return None
    threads = max(1, cores // (setup.replicas * setup.ranks))
    setting, value, also = "engine.threads", str(threads), {}
    if cores < each and setup.threads == 1:
        setting, value = "engine.tensor_parallel_size", "1"
    elif setup.threads <= threads:
        setting, value = "replicas", _replicas(cores // each, setup.least_replicas)
        also = {"roles.prefill": "0"} if setup.roles else {}  # of fewer replicas none might decode
    return Advice(
        "more-threads-than-cores",
        Severity.WARNING,
        f"{setup.replicas} replicas of {each} threads each, and {cores} cores",
        setting,
        value,
        "Threads without a core of their own spin while others wait for them: requests become several times slower.",
        _ON_CPU,
        also,
    )


def _replicas(most: int, least: int | None) -> str:
    """Bounds where their number follows the load, and still can."""
    return str(most) if least is None or least >= most else f"{{min: {least}, max: {most}}}"


def _round_up(nbytes: int) -> int:
    return -(-nbytes // MIB) * MIB
