"""How many replicas Serve is to run, as its own configuration.

Leans on Ray 2.60.0: replicas report every `metrics_interval_s` (called deprecated; the environment variables that are
to replace it are read by nobody) and take a point every fifth of `look_back_period_s`, if that is less.
"""

from __future__ import annotations

import warnings
from typing import Any

from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from configs.settings import Settings

POLICY = "deployments.scaling.policy:KVAwareScaling"
_INTERVALS_LOOKED_BACK = 3
_LONGEST_INTERVAL_S = 10.0
_SHORTEST_INTERVAL_S = 0.5
_SLACK_S = 5.0
"""What nodes' clocks may differ by, and a report take."""


def replica_options(settings: Settings) -> dict[str, Any]:
    """Options of `serve.deployment`: a number of replicas, or how it follows the load."""
    if not settings.scales:
        return {"num_replicas": settings.min_replicas}
    scaling = settings.scaling
    # With Serve's own delay these are Serve's own defaults, 10 s and 30 s; who wants to react sooner must know sooner.
    interval_s = min(_LONGEST_INTERVAL_S, max(_SHORTEST_INTERVAL_S, scaling.upscale_delay_s / _INTERVALS_LOOKED_BACK))
    look_back_s = _INTERVALS_LOOKED_BACK * interval_s
    policy = AutoscalingPolicy(
        policy_function=POLICY,
        policy_kwargs={
            "ttft_target_s": scaling.ttft_target_s,
            "max_num_seqs": settings.engine.max_num_seqs,
            "old_s": look_back_s + interval_s + _SLACK_S,
        },
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        autoscaling = AutoscalingConfig(
            min_replicas=settings.min_replicas,
            max_replicas=settings.max_replicas,
            upscale_delay_s=scaling.upscale_delay_s,
            downscale_delay_s=scaling.downscale_delay_s,
            metrics_interval_s=interval_s,
            look_back_period_s=look_back_s,
            policy=policy,
        )
    return {"autoscaling_config": autoscaling}
