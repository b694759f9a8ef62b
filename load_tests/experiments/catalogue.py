"""The experiments, in the order of the study."""

from __future__ import annotations

from load_tests.experiments.batches import BatchLimits, MicroBatch, TokensPerPass
from load_tests.experiments.experiment import Experiment
from load_tests.experiments.memory import KVBytes, ReuseMemory
from load_tests.experiments.moving import ReuseLatency
from load_tests.experiments.prefill import OutputShare, PrefillLength, PrefillShare
from load_tests.experiments.swap import Swap

EXPERIMENTS: dict[str, Experiment] = {
    experiment.name: experiment
    for experiment in (
        PrefillShare(), PrefillLength(), OutputShare(), KVBytes(), BatchLimits(), MicroBatch(), ReuseLatency(),
        ReuseMemory(), Swap(), TokensPerPass(),
    )
}  # fmt: skip
