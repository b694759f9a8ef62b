"""The settings of scheduling, as they travel to the engine: in `VllmConfig.additional_config`.

vLLM builds the scheduler itself, in whatever process the engine is, and hands it nothing but its own configuration.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from kvmanager.scheduling.policies import PolicyName

if TYPE_CHECKING:
    from configs.settings import Settings

KEY = "crosskv_scheduling"
POLICY_SCHEDULER = "deployments.engine.scheduling.policy_scheduler.PolicyScheduler"


@dataclass(frozen=True, slots=True)
class SchedulingOptions:
    """`tpot_target_s`: seconds; None: steps are as long as vLLM's own."""

    policy: PolicyName = "fcfs"
    tpot_target_s: float | None = None

    @classmethod
    def read(cls, vllm_config: Any) -> SchedulingOptions:
        """Return the options that `scheduling_arguments` put there; the defaults where it put none."""
        return cls(**(getattr(vllm_config, "additional_config", None) or {}).get(KEY, {}))


def scheduling_arguments(settings: Settings, others: Mapping[str, Any]) -> dict[str, Any]:
    """Return additions to vLLM's engine arguments; empty where the settings ask for nothing.

    `others`: the arguments so far, of which `additional_config` is kept.
    """
    engine = settings.engine
    options = SchedulingOptions(engine.scheduler, engine.tpot_target_s)
    if options == SchedulingOptions():
        return {}
    arguments: dict[str, Any] = {"additional_config": {**(others.get("additional_config") or {}), KEY: asdict(options)}}
    if options.policy != "fcfs":
        # vLLM's queue by `Request.priority`, which is then ours: a client's own number never reaches it.
        arguments |= {"scheduler_cls": POLICY_SCHEDULER, "scheduling_policy": "priority"}
    return arguments
