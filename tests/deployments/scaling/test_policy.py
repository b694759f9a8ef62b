"""Serve's hook over a context made by hand: figures in, a number out; whatever is wrong with them changes nothing."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
from ray.serve._private.autoscaling_state import DeploymentAutoscalingState, _resolve_policy_callable
from ray.serve._private.common import DeploymentID, ReplicaID, TimeStampedValue
from ray.serve.config import AutoscalingContext

from configs.settings import load_settings
from deployments.protocol.manager_client import ManagerUnavailableError
from deployments.scaling.policy import KVAwareScaling, replica_options
from kvmanager.scaling.demand import NAMES, ReplicaLoad

DEPLOYMENT = DeploymentID("Replica", "app")
NOW = 1_000_000.0
IDLE = ReplicaLoad(0.0, 0.0, 0.0, 0.0)
BUSY = ReplicaLoad(5.0, 0.5, 10.0, 8.0)


class Manager:
    """Remembers what it is told, or cannot be found."""

    told: list[tuple[Any, ...]]
    gone = False

    def __init__(self, app_name: str) -> None:
        assert app_name == "app"

    def tell(self, method: str, *args: Any) -> None:
        if self.gone:
            raise ManagerUnavailableError
        assert (method, args[0]) == ("api", "scaling")
        self.told.append(args[1:])


@pytest.fixture(autouse=True)
def manager(monkeypatch: pytest.MonkeyPatch) -> type[Manager]:
    Manager.told, Manager.gone = [], False
    # Serve's pickle of the class, loaded in this process, gives its methods a copy of the module's names.
    monkeypatch.setitem(KVAwareScaling._say.__globals__, "ManagerClient", Manager)
    return Manager


def scaling() -> KVAwareScaling:
    return KVAwareScaling(ttft_target_s=2.0, max_num_seqs=32, old_s=45.0)


def context(
    loads: Mapping[str, ReplicaLoad | dict[str, float]], target: int, at: float = NOW, age_s: float = 1.0, **other: Any
) -> AutoscalingContext:
    """As Serve makes it for these running replicas, whose last reports are `age_s` old."""
    ids = {name: ReplicaID(name, DEPLOYMENT) for name in loads}
    stats = {name: load if isinstance(load, dict) else load.stats() for name, load in loads.items()}
    means = {each: {ids[name]: of[each] for name, of in stats.items() if each in of} for each in NAMES}
    points = {
        each: {replica: [TimeStampedValue(at - age_s, value)] for replica, value in of.items()}
        for each, of in means.items()
    }
    values: dict[str, Any] = {
        "deployment_id": DEPLOYMENT,
        "deployment_name": "Replica",
        "app_name": "app",
        "current_num_replicas": len(loads),
        "target_num_replicas": target,
        "running_replicas": list(ids.values()),
        "total_num_requests": lambda: pytest.fail("it may stay high after draining"),
        "total_queued_requests": lambda: pytest.fail("it is not wanted"),
        "aggregated_metrics": lambda: means,
        "raw_metrics": lambda: points,
        "capacity_adjusted_min_replicas": 1,
        "capacity_adjusted_max_replicas": 4,
        "policy_state": {},
        "last_scale_up_time": None,
        "last_scale_down_time": None,
        "current_time": at,
        "config": None,
    }
    return AutoscalingContext(**{**values, **other})


def test_figures_in_and_a_number_out(manager: type[Manager]) -> None:
    policy = scaling()
    assert policy(context({"a": BUSY}, 1)) == (4, {}), "five replicas' worth, of which there may be four"
    assert policy(context({"a": IDLE, "b": IDLE}, 2, NOW + 2.0)) == (1, {})
    assert [told[:4] for told in manager.told] == [(4, 1, 1, "queued_prefill"), (1, 2, 2, "fits")]
    assert manager.told[0][4]["queued_prefill"] == pytest.approx(5.0)


@pytest.mark.parametrize(
    ("loads", "age_s"),
    [
        ({"a": BUSY}, 46.0),
        ({"a": IDLE, "b": {}}, 1.0),
        ({"a": IDLE, "b": {**IDLE.stats(), "kv_pressure": float("nan")}}, 1.0),
        ({"a": IDLE, "b": {"ongoing": 0.0}}, 1.0),
        ({}, 1.0),
    ],
)
def test_what_is_old_or_not_there_changes_nothing(loads: Any, age_s: float) -> None:
    for target in (1, 2, 4):
        assert scaling()(context(loads, target, age_s=age_s))[0] == target


@pytest.mark.parametrize("broken", [{"aggregated_metrics": lambda: 1 / 0}, {"running_replicas": 3}])
def test_an_error_changes_nothing_and_is_said_once(broken: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    policy = scaling()
    logging.getLogger("ray.serve").addHandler(caplog.handler)
    for turn in range(3):
        assert policy(context({"a": BUSY}, 2, NOW + 2.0 * turn, **broken)) == (2, {})
    logging.getLogger("ray.serve").removeHandler(caplog.handler)
    assert [record.levelname for record in caplog.records if record.name == "ray.serve"].count("ERROR") == 1


def test_a_manager_that_is_away_holds_nothing_up_and_a_new_one_is_told(manager: type[Manager]) -> None:
    policy, manager.gone = scaling(), True
    assert policy(context({"a": BUSY}, 1))[0] == 4
    manager.gone = False
    policy(context({"a": BUSY}, 1, NOW + 0.1))
    policy(context({"a": BUSY}, 1, NOW + 0.2))
    assert len(manager.told) == 1, "as soon as it is found, and then not in each turn"
    policy(context({"a": BUSY}, 1, NOW + 6.0))
    assert len(manager.told) == 2, "a new one is told without a change"


def test_serve_keeps_its_delays_and_bounds_around_it() -> None:
    """The whole way through Serve's own state: the class from its pickle, the delays, the bounds."""
    settings = load_settings({"replicas": {"min": 1, "max": 3}, "scaling": {"upscale_delay_s": 0}})
    autoscaling = replica_options(settings)["autoscaling_config"]
    assert (autoscaling.min_replicas, autoscaling.max_replicas, autoscaling.downscale_delay_s) == (1, 3, 600.0)
    policy = _resolve_policy_callable(autoscaling.policy)
    assert type(policy).__name__ == "KVAwareScaling"

    state = DeploymentAutoscalingState(DEPLOYMENT)
    info: Any = SimpleNamespace(
        deployment_config=SimpleNamespace(autoscaling_config=autoscaling, gang_scheduling_config=None),
        target_capacity=None,
        target_capacity_direction=None,
        config_changed=lambda other: True,
    )
    assert state.register(info, 1) == 1
    assert state.get_decision_num_replicas(1) == 1, "no replica runs, none has said anything"
    assert state.get_decision_num_replicas(9) == 3, "Serve's own bounds"


@pytest.mark.parametrize(
    ("delay_s", "interval_s", "look_back_s"), [(30, 10.0, 30.0), (600, 10.0, 30.0), (3, 1.0, 3.0), (0, 0.5, 1.5)]
)
def test_who_wants_to_react_sooner_hears_sooner(delay_s: float, interval_s: float, look_back_s: float) -> None:
    settings = load_settings({"replicas": {"max": 2}, "scaling": {"upscale_delay_s": delay_s}})
    autoscaling = replica_options(settings)["autoscaling_config"]
    assert (autoscaling.metrics_interval_s, autoscaling.look_back_period_s) == (interval_s, look_back_s)
    json.dumps(autoscaling.policy.policy_kwargs)


@pytest.mark.parametrize("replicas", [3, {"min": 3, "max": 3}])
def test_a_fixed_number_is_served_as_ever(replicas: Any) -> None:
    assert replica_options(load_settings({"replicas": replicas})) == {"num_replicas": 3}


def test_the_policy_loads_in_a_controller_without_the_engines_libraries() -> None:
    program = (
        "import sys, deployments.scaling.policy; print(sorted({'vllm', 'torch', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
