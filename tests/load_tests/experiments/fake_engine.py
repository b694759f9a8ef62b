"""An engine of the study that answers by arithmetic."""

from __future__ import annotations

from typing import Any

from load_tests.experiments import memory
from load_tests.experiments.__main__ import EXPERIMENTS
from load_tests.experiments.experiment import Point
from load_tests.experiments.report import Result
from load_tests.experiments.runner import run_points
from load_tests.experiments.sizes import Sizes
from load_tests.measuring.journal import Journal

SMALLER = {"raw": 1, "lossless": 1.5, "cachegen": 7, "sparse": 2, "sparse + cachegen": 14}
SIZES = Sizes(("10m", "40m", "365m"), {"10m": 2048, "40m": 2048, "365m": 512}, "bfloat16", 2, quick=True)


class FakeEngine:
    """Answers as the engines' hosts do, at a rate of 1,000 tokens a second; each decode step takes 10 ms."""

    def __init__(self, spec: Any = None) -> None:
        self.spec = spec
        self.calls: list[str] = []
        self.rounds: list[tuple[str, float, int]] = []
        self.closed: list[bool] = []

    def call(self, method: str, **named: Any) -> Any:
        self.calls.append(method)
        return getattr(self, method)(**named)

    def memory_bytes(self) -> tuple[int, int]:
        return (700 << 20, 0) if self.spec is not None and not self.spec.tiered else (750 << 20, 900 << 20)

    def cpu_s(self) -> float:
        return 0.0

    def close(self, at_once: bool = False) -> None:
        self.closed.append(at_once)

    def kv_bytes_per_block(self) -> int:
        return 32 * memory.formula_bytes("10m", 1)

    def run(self, prompts: list[int], max_tokens: int, step_tokens: int = 2048, pool_blocks: int = 639) -> Any:
        first = sum(prompts) / 1000
        times = [[first + 0.01 * token for token in range(max_tokens)] for _ in prompts]
        held = min(pool_blocks, sum(-(-(tokens + max_tokens) // 32) for tokens in prompts))
        running = min(len(prompts), pool_blocks * 32 // (prompts[0] + max_tokens))
        steps = [(sum(prompts), running, first, held)] + [(len(prompts), running, 0.01, held)] * (max_tokens - 1)
        return {"requests": times, "steps": steps}

    def round(self, tokens: int, max_tokens: int, codec: str = "raw", bytes_per_s: float = 0.0) -> Any:
        stored = tokens * 1000 // SMALLER[codec]
        linked = stored / bytes_per_s if bytes_per_s else 0.0
        seconds = {"none": tokens / 1000, "device": 0.01, "cpu": 0.02, "redis": 0.05 + linked}
        found: dict[str, Any] = {
            source: {
                "ttft_s": first,
                "seconds": first + 0.01 * max_tokens,
                "reused": 0 if source == "none" else tokens - 32,
            }
            for source, first in seconds.items()
        }
        self.rounds.append((codec, bytes_per_s, tokens))
        return found | {"out": {"cpu": 0.03, "redis": 0.06 + linked}, "bytes": {"cpu": tokens * 1000, "redis": stored}}

    def fill(self, prompts: int, tokens: int) -> dict[str, int]:
        return {"cpu": prompts * tokens * 4096, "redis": prompts * tokens * 3000}


def measured(journal: Journal[Point], only: list[str] | None = None) -> list[Result]:
    """All experiments, or these, over `SIZES`."""
    planned = {name: one.points(SIZES) for name, one in EXPERIMENTS.items() if not only or name in only}
    points = [point for found in planned.values() for point in found]
    assert run_points(points, EXPERIMENTS, journal, FakeEngine, lambda point, done: None) == []
    return [Result(EXPERIMENTS[name], len(found), journal.of(found)) for name, found in planned.items()]
