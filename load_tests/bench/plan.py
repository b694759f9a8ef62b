"""What is measured: the sizes that every arm shares, and a name for each measurement."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass
from typing import Any, Literal

from configs.settings import load_settings
from load_tests.bench.arms import ARMS
from load_tests.harness.models import MAX_POSITIONS
from load_tests.peers.engine import Dtype

Lengths = Literal["random", "aligned"]


@dataclass(frozen=True, order=True)
class Key:
    """One workload on one server: `working_set` is its size over the device pools of all replicas."""

    model: str
    alternation: int
    arm: str
    workload: str
    working_set: float

    @property
    def key(self) -> dict[str, Any]:
        """In the journal."""
        return asdict(self)


@dataclass(frozen=True)
class Sizes:
    """What a measurement depends on besides its key. Blocks are per replica.

    `requests_per_s` is for workloads whose requests come by time; None: by the model's size, and multi-round QA is a
    closed loop.
    """

    replicas: int = 2
    device_blocks: int = 64
    dtype: Dtype = "auto"
    requests_per_s: float | None = None
    seed: int = 0
    lengths: Lengths = "random"
    """Of long-document QA: drawn, or all equal and a whole number of blocks."""

    @property
    def pool_tokens(self) -> int:
        """Tokens of KV that one replica's device holds; vLLM keeps one block for itself, the null block."""
        return (self.device_blocks - 1) * load_settings({}).block_size_tokens

    @property
    def max_model_len(self) -> int:
        """Longest prompt and answer together, in tokens: what a pool holds, and the models take."""
        return min(self.pool_tokens, MAX_POSITIONS)

    def digest(self) -> str:
        """Measurements of different sizes, or of engines that step otherwise, lie in different files."""
        sizes = asdict(self) | {"step_tokens": load_settings({}).max_num_batched_tokens}
        return hashlib.sha256(json.dumps(sizes, sort_keys=True).encode()).hexdigest()[:8]


@dataclass(frozen=True)
class Plan:
    """Everything that one run measures."""

    models: tuple[str, ...]
    arms: tuple[str, ...]
    workloads: tuple[str, ...]
    working_sets: tuple[float, ...]
    alternations: int
    sizes: Sizes

    def keys(self) -> list[Key]:
        """All measurements: every arm on the workloads that are for it."""
        return [
            Key(model, alternation, arm, workload, working_set)
            for model in self.models
            for alternation in range(self.alternations)
            for arm in self.arms
            for workload in self.workloads
            if ARMS[arm].takes(workload)
            for working_set in self.working_sets
        ]
