"""How much is measured, and on which engines, whose sizes are equal for all. Light: imports no engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from configs import machine

PROMPTS = (128, 512, 1024, 2048, 4096, 8192, 16384)
"""0.1K to 16K, as the study asks."""
LONGEST_TIERED = 4096
"""More would not fit the tiers of `load_tests.experiments.engines.tiered` three times."""
LARGE_PARAMETERS = 100_000_000
"""From here on a model is too slow on two cores for prompts of 16K."""
DTYPE_BYTES = {"bfloat16": 2, "float32": 4}
"""Types of weights and KV that the study knows."""
DEVICE_BLOCKS = 640
"""Of plain vLLM; blocks of 32 tokens: a prompt of 16K and its answer."""
MOST_SEQUENCES = 64
STEP_TOKENS = 2048
"""Of one engine step at most. Not the setting's default, so that machines with another default can be compared."""
WIDEST_STEP_TOKENS = 4096


@dataclass(frozen=True)
class EngineSpec:
    """Which engine a point needs; points with equal ones share it.

    Plain vLLM, `kv.enabled: false`, which can be told to take fewer tokens into a step, and fewer blocks; or,
    `tiered`, vLLM with KV reuse, a CPU tier and Redis, which can be told to store with other codecs.
    """

    model: str
    dtype: str
    tiered: bool = False

    def open(self, folder: str) -> Any:
        """The engine in this process, of the model in `folder`; with Ray and Redis below it when it is tiered."""
        if self.tiered:
            from load_tests.experiments.engines.tiered import TieredHost

            return TieredHost(folder, self.dtype)
        from load_tests.experiments.engines.plain import PlainEngine

        return PlainEngine(folder, self.dtype)


@dataclass(frozen=True)
class Sizes:
    """`models` are in order of size; `longest` is the longest prompt of each, in tokens."""

    models: tuple[str, ...]
    longest: Mapping[str, int]
    dtype: str
    repeats: int = 3
    quick: bool = False

    def engine(self, model: str, tiered: bool = False) -> EngineSpec:
        """With reuse, or plain."""
        return EngineSpec(model, self.dtype, tiered)

    def prompts(self, model: str, at_most: int | None = None) -> list[int]:
        """Prompt lengths up to the model's longest, and `at_most`."""
        most = min(self.longest[model], at_most or self.longest[model])
        return [tokens for tokens in PROMPTS if tokens <= most] or [most]

    def tiered_prompts(self, model: str) -> list[int]:
        """Prompts whose KV is stored: two segments and more."""
        return [tokens for tokens in self.prompts(model, LONGEST_TIERED) if tokens >= 512] or [512]

    def tiered_bands(self, model: str) -> list[tuple[int, int]]:
        """Shortest and longest prompt of bands of lengths, one after the other, whose KV is stored."""
        edges = self.tiered_prompts(model)
        return list(pairwise(edges)) or [(edges[0], edges[0] * 3 // 2)]

    @property
    def batches(self) -> list[int]:
        """Requests at once."""
        return [1, 4, 16] if self.quick else [1, 2, 4, 8, 16, 32]


def fast_dtype() -> str:
    """What is computed fast: bfloat16 on CUDA, and on a CPU as `dtype: auto` has it."""
    return "bfloat16" if machine.accelerator() == "cuda" else machine.cpu_dtype()


def longest_prompt(parameters: int, quick: bool) -> int:
    """Return the default, in tokens, of a model with `parameters`."""
    longest = 4096 if parameters >= LARGE_PARAMETERS else 16384
    return longest // 8 if quick else longest
