"""Ray Serve's autoscaling policy: what replicas report, and back a number of replicas.

Translation only; what is decided is `kvmanager.scaling.demand`'s. Serve makes one object of the class, in its
controller, and calls it in each turn of the control loop. So nothing here waits: figures are what Serve has, and the
manager is told without an answer. Imports neither vLLM nor torch. Serve pickles this module by value and what it
imports by name.

Serve puts around it the bounds, the delays, and the start from no replica at all. Whatever fails here, the number stays
as it is.

Leans on Ray 2.60.0: `AutoscalingContext` with `aggregated_metrics` (means over `look_back_period_s`, by name and
replica), `raw_metrics` (lists of points with `timestamp`, of the replica's clock), `running_replicas`,
`target_num_replicas`, `capacity_adjusted_min_replicas` and `_max_replicas`, `current_time`; a policy's class gets
`policy_kwargs`, and answers (replicas, a dictionary that Serve keeps).
"""

from __future__ import annotations

import logging
import warnings
from typing import TYPE_CHECKING, Any

from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from configs.settings import Settings
from deployments.protocol.manager_client import ManagerClient, ManagerUnavailableError
from kvmanager.scaling.demand import NAMES, Bounds, Limits, ReplicaLoad, ScalingDecision, decide, replica_load

if TYPE_CHECKING:
    from ray.serve.config import AutoscalingContext


logger = logging.getLogger("ray.serve")  # in the controller it is the one that is written and shown

DECIDE_EVERY_S = 1.0
"""Serve asks ten times a second, and computes its means for each answer."""
SAY_EVERY_S = 5.0
"""At least so often the manager hears what is decided: it may be a new one."""


class KVAwareScaling:
    """See the module's docstring."""

    def __init__(self, ttft_target_s: float, max_num_seqs: int, old_s: float) -> None:
        """`old_s`: a replica without a report for this long is not known."""
        self._limits = Limits(ttft_target_s, max_num_seqs)
        self._old_s = old_s
        self._decided: tuple[float, int, ScalingDecision] | None = None
        self._said: tuple[float, tuple[int, int, int, str]] = (0.0, (0, 0, 0, ""))
        self._manager: ManagerClient | None = None
        self._failed = False

    def __call__(self, ctx: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return how many replicas there should be; Serve adds its delays."""
        target = int(ctx.target_num_replicas)
        try:
            decision = self._decide(ctx, target)
            self._say(ctx, target, decision)
            return decision.replicas, {}
        except Exception:
            if not self._failed:
                logger.exception("the number of replicas cannot be decided on, and stays as it is")
            self._failed = True
            return target, {}

    def _decide(self, ctx: AutoscalingContext, target: int) -> ScalingDecision:
        now = float(ctx.current_time or 0.0)
        if self._decided is not None:
            at, of, decision = self._decided
            if of == target and 0.0 <= now - at < DECIDE_EVERY_S:
                return decision
        bounds = Bounds(int(ctx.capacity_adjusted_min_replicas), int(ctx.capacity_adjusted_max_replicas))
        decision = decide(self._loads(ctx, now), target, bounds, self._limits)
        if self._decided is None or self._decided[2].replicas != decision.replicas:
            asked = ", ".join(f"{figure} {replicas:.2f}" for figure, replicas in decision.demands.items())
            logger.info(
                "replicas: %d are desired (%s), %d aimed at, %d run; asked for by %s",
                decision.replicas, decision.why, target, ctx.current_num_replicas, asked or "nothing that is known",
            )  # fmt: skip
        self._decided = now, target, decision
        return decision

    def _loads(self, ctx: AutoscalingContext, now: float) -> list[ReplicaLoad | None]:
        """What each running replica says of its load; None of one whose figures are missing or old."""
        means, points = ctx.aggregated_metrics or {}, ctx.raw_metrics or {}
        loads: list[ReplicaLoad | None] = []
        for replica in ctx.running_replicas:
            series = [points.get(name, {}).get(replica) for name in NAMES]
            is_known = all(each and now - each[-1].timestamp <= self._old_s for each in series)
            stats = {name: means.get(name, {}).get(replica, -1.0) for name in NAMES}
            loads.append(replica_load(stats) if is_known else None)
        return loads

    def _say(self, ctx: AutoscalingContext, target: int, decision: ScalingDecision) -> None:
        """Tell the manager, for /metrics and /health: what changes at once, and every `SAY_EVERY_S`."""
        now, running = float(ctx.current_time or 0.0), int(ctx.current_num_replicas)
        word = decision.replicas, target, running, decision.why
        if self._said[1] == word and 0.0 <= now - self._said[0] < SAY_EVERY_S:
            return
        if self._manager is None:
            self._manager = ManagerClient(str(ctx.app_name))
        try:
            self._manager.tell("api", "scaling", *word, dict(decision.demands))
        except ManagerUnavailableError:  # it is being looked for, or is being recreated
            return
        self._said = now, word


# How many replicas Serve is to run, as its own configuration.
#
# Leans on Ray 2.60.0: replicas report every `metrics_interval_s` (called deprecated; the environment variables that are
# to replace it are read nowhere) and take a point every fifth of `look_back_period_s`, if that is less.


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
    # With Serve's own delay these are Serve's own defaults, 10 s and 30 s; a faster reaction needs faster reports.
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
