"""The experiments, in the order of the study."""

from __future__ import annotations

from load_tests.experiments import (
    batch_limits,
    kv_bytes,
    micro_batch,
    output_share,
    prefill_length,
    prefill_share,
    reuse_latency,
    reuse_memory,
    swap,
    swap_compressed,
    tokens_per_pass,
)
from load_tests.experiments.experiment import Experiment

EXPERIMENTS: dict[str, Experiment] = {
    module.EXPERIMENT.name: module.EXPERIMENT
    for module in (
        prefill_share, prefill_length, output_share, kv_bytes, batch_limits, micro_batch, reuse_latency, reuse_memory,
        swap, swap_compressed, tokens_per_pass,
    )
}  # fmt: skip
