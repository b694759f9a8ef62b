"""What computing, loading and storing KV costs: the numbers behind every estimate of the simulator.

Nothing here is measured by the simulator itself. The defaults describe one well-known case, and `Costs.from_file` takes
the numbers of another: measure them where you serve.
"""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from kvmanager.index.locations import Tier


class CostsError(ValueError):
    """Costs that cannot be used. One sentence."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Rates of one replica. A load takes its tier's latency once, and then the bytes at its rate."""

    model: str = "8B parameters, 32 layers of 8 KV heads of 128, bf16, on one 80 GB GPU"
    """What the numbers below are of."""
    prefill_tokens_per_s: float = 20_000.0
    kv_bytes_per_token: int = 131_072
    """2 (K and V) x 32 layers x 8 heads x 128 x 2 bytes."""
    cpu_latency_s: float = 0.002
    cpu_bytes_per_s: float = 20e9
    """Host memory to device memory, over PCIe 5 with checksums."""
    redis_latency_s: float = 0.004
    redis_bytes_per_s: float = 3e9
    """Redis to host memory: a few connections over a 25 Gbit/s link."""
    decode_s_per_token: float = 0.02
    """Of one running request."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, str):
            raise CostsError(f"model must be a text, got {self.model!r}")
        for name, value in asdict(self).items():
            if name == "model":
                continue
            is_number = type(value) in (int, float) and value < math.inf
            if name.endswith("latency_s"):
                if not (is_number and value >= 0):
                    raise CostsError(f"{name} must be a number from 0 on, got {value!r}")
            elif not (is_number and value > 0):
                raise CostsError(f"{name} must be a positive number, got {value!r}")
        if type(self.kv_bytes_per_token) is not int:
            raise CostsError(f"kv_bytes_per_token must be a whole number of bytes, got {self.kv_bytes_per_token!r}")

    @classmethod
    def from_file(cls, path: Path | str) -> Costs:
        """Read a JSON object with any of the fields; the others keep their defaults. Raises CostsError."""
        try:
            given: Any = json.loads(Path(path).read_bytes())
        except OSError as error:
            raise CostsError(f"{path} cannot be read ({error.strerror}).") from None
        except (ValueError, RecursionError):
            raise CostsError(f"{path} is not JSON.") from None
        names = [field.name for field in fields(cls)]
        if not isinstance(given, dict) or (unknown := sorted(set(given) - set(names))):
            wrong = f"has no use for {', '.join(unknown)}" if isinstance(given, dict) else "is not a JSON object"
            raise CostsError(f"{path} {wrong}; costs are {', '.join(names)}.")
        try:
            return cls(**given)
        except CostsError as error:
            raise CostsError(f"{path}: {error}.") from None

    def prefill_s(self, tokens: int) -> float:
        """Return how long computing the KV of ``tokens`` takes."""
        return tokens / self.prefill_tokens_per_s

    def load_s(self, tier: Tier, tokens: int) -> float:
        """Return how long it takes until the KV of ``tokens`` is on the device; nothing if it is there, or is none."""
        if tokens == 0 or tier is Tier.DEVICE:
            return 0.0
        nbytes = tokens * self.kv_bytes_per_token
        seconds = self.cpu_latency_s + nbytes / self.cpu_bytes_per_s
        if tier is Tier.REDIS:  # it goes through host memory
            seconds += self.redis_latency_s + nbytes / self.redis_bytes_per_s
        return seconds

    def ttft_s(self, tokens: int, cpu_tokens: int = 0, redis_tokens: int = 0) -> float:
        """Return the time to the first token, queues left out: ``tokens`` computed after the others are loaded."""
        return self.load_s(Tier.CPU, cpu_tokens) + self.load_s(Tier.REDIS, redis_tokens) + self.prefill_s(tokens)
