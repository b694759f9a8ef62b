"""Which engine a point needs. Points with equal specifications share one. Light: imports no engine."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

DEVICE_BLOCKS = 640
"""Of plain vLLM; blocks of 32 tokens: a prompt of 16K and its answer."""
MOST_SEQUENCES = 64
STEP_TOKENS = 2048
"""Of one engine step at most. Not the setting's default, so that machines with another default can be compared."""
WIDEST_STEP_TOKENS = 4096


@dataclass(frozen=True)
class EngineSpec:
    """Plain vLLM, `kv.enabled: false`, which can be told to take fewer tokens into a step, and fewer blocks; or,
    `tiered`, vLLM with KV reuse, a CPU tier and Redis, which can be told to store with other codecs."""

    model: str
    dtype: str
    tiered: bool = False

    def open(self, folder: str) -> AbstractContextManager[Any]:
        """The engine in this process, of the model in `folder`; with Ray and Redis below it when it is tiered."""
        if self.tiered:
            from load_tests.experiments.tiered_engine import tiered_engine

            return tiered_engine(folder, self.dtype)
        from load_tests.experiments.plain_engine import plain_engine

        return plain_engine(folder, self.dtype)
