"""How many replicas there are, and when their number follows the load."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import Field

from configs.section import Section


class ReplicaBounds(Section):
    """At least and at most so many replicas; Ray Serve starts and ends them by their load."""

    min: int = Field(ge=1)
    max: int = Field(ge=1)


class ScalingSettings(Section):
    """When the number of replicas follows the load; without effect where `replicas` is a number."""

    ttft_target_s: float = Field(
        2.0,
        gt=0,
        description="Wanted time to the first token. More replicas start when the prompts in front of the engines take "
        "half of it.",
    )
    upscale_delay_s: float = Field(
        30.0, ge=0, description="More replicas must be needed for so long. Below 30, replicas also report more often."
    )
    downscale_delay_s: float = Field(
        600.0, ge=0, description="One replica less must be enough for so long. With each goes the KV on its device."
    )


def replica_count(value: Any) -> int | ReplicaBounds:
    """What `replicas` may be. Raises ValueError, in words that name what works."""
    if isinstance(value, ReplicaBounds):
        return value
    if not isinstance(value, Mapping):
        return _whole(value, "it")
    unknown = sorted(str(name) for name in value if name not in ReplicaBounds.model_fields)
    if unknown or "max" not in value:
        wrong = f"there is no {unknown[0]!r}" if unknown else "max is not given"
        raise ValueError(f"{wrong}; use an integer, or bounds such as {{min: 1, max: 4}}")
    least, most = _whole(value.get("min", 1), "min"), _whole(value["max"], "max")
    if least > most:
        raise ValueError(f"min must be less than or equal to max, {most}, not {least}")
    return ReplicaBounds(min=least, max=most)


def _whole(value: Any, name: str) -> int:
    if isinstance(value, str) and value.strip().isdecimal():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be an integer, or bounds such as {{min: 1, max: 4}}, not {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be greater than or equal to 1, not {value}")
    return int(value)
