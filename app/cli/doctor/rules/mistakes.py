"""Mistakes that are seen in the settings alone, without any traffic."""

from __future__ import annotations

from app.cli.doctor.advice import Advice, Severity
from app.cli.doctor.figures import Figures
from app.cli.doctor.rules.ordinary_text import times_in_ordinary_text

_MIB = 1024**2
_ON_CPU = "docs/guide/settings.md#engine"


def separator_in_ordinary_text(figures: Figures) -> Advice | None:
    """A separator that stands in ordinary text cuts documents into pieces that no other prompt has."""
    setup = figures.setup
    for separator in (setup.separators or ()) if setup else ():
        times = times_in_ordinary_text(separator) if isinstance(separator, str) else 0
        if times:
            return Advice(
                "separator-in-ordinary-text",
                Severity.WARNING,
                f"blending.separators has {separator!r}, which stands {times} times in a page of ordinary text",
                "blending.separators",
                '["<|doc|>"], or another special token of the model',
                "Each place where it stands begins a chunk. Many are too short to be stored, and documents are cut.",
                "docs/concepts/blending.md#how-chunks-are-recognized",
            )
    return None


def layerwise_buffer_below_a_layer(figures: Figures) -> Advice | None:
    """The layerwise buffer does not hold a group of layers of the longest prompt: a replica refuses to start so."""
    setup = figures.setup
    if setup is None or setup.layerwise == "off" or setup.layerwise_buffer_bytes is None:
        return None
    if not setup.kv_bytes_per_token or not setup.layers or not setup.longest_request_tokens:
        return None
    block = setup.block_tokens or 1
    tokens = -(-setup.longest_request_tokens // block) * block  # KV moves in whole blocks
    a_layer = tokens * setup.kv_bytes_per_token // setup.layers
    least = a_layer * (setup.layers_per_group or 1)
    if setup.layerwise_buffer_bytes >= least:
        return None
    return Advice(
        "layerwise-buffer-below-a-layer",
        Severity.CRITICAL,
        f"kv.layerwise.buffer_bytes is {setup.layerwise_buffer_bytes}; a layer of the longest prompt, "
        f"{setup.longest_request_tokens} tokens, has {a_layer} bytes, and {setup.layers_per_group or 1} move together",
        "kv.layerwise.buffer_bytes",
        str(_round_up(least)),
        "Such a prompt could not be loaded layer by layer, so a replica refuses to start.",
        "docs/concepts/loading.md#layer-by-layer",
    )


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
    larger = setup.cpu_tier_within(_round_up(of_a_node))
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
        "docs/guide/operations.md#what-makes-the-cache-cold",
    )


def more_threads_than_cores(figures: Figures) -> Advice | None:
    """All replicas' threads together are more than the cores: they wait for each other, spinning."""
    setup = figures.setup
    if setup is None or setup.accelerator != "cpu" or not (setup.threads and setup.replicas and setup.cores):
        return None
    cores = setup.cores * figures.traffic.nodes
    if setup.threads * setup.replicas <= cores:
        return None
    threads = max(1, cores // setup.replicas)
    fewer_threads = setup.threads > threads
    return Advice(
        "more-threads-than-cores",
        Severity.WARNING,
        f"{setup.replicas} replicas of {setup.threads} threads each, and {cores} cores",
        "engine.threads" if fewer_threads else "replicas",
        str(threads if fewer_threads else cores // setup.threads),
        "Threads without a core of their own spin while others wait for them: requests become several times slower.",
        _ON_CPU,
    )


def _round_up(nbytes: int) -> int:
    return -(-nbytes // _MIB) * _MIB
