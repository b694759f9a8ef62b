"""What Ray and Serve are told when they start."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import ray
from ray._private.resource_and_label_spec import ResourceAndLabelSpec

from app.launch.cluster import ray_environment, ray_options, write_token
from configs.settings import load_settings


def numbers_said(code: str, model_folder: Path, folder: Path, many: int) -> list[float]:
    """The last numbers that a process of the server's environment prints."""
    environment = ray_environment(load_settings({"model": str(model_folder)}), write_token(folder))
    printed = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return [float(word) for word in printed.stdout.split()[-many:]]


def test_ray_keeps_no_record_of_each_call_and_gives_a_raylet_a_minute(model_folder: Path, tmp_path: Path) -> None:
    environment = ray_environment(load_settings({"model": str(model_folder)}), write_token(tmp_path))
    assert environment["RAY_task_events_report_interval_ms"] == "0"
    assert environment["RAY_raylet_start_wait_time_s"] == "60"
    library = Path(ray.__file__).with_name("_raylet.so").read_bytes()
    assert b"RAY_raylet_start_wait_time_s" in library
    assert b"task_events_report_interval_ms" in library, "Ray reads RAY_ and the name of a setting of its own"


def test_an_idle_servers_controller_and_log_monitor_look_seldom(model_folder: Path, tmp_path: Path) -> None:
    code = (
        "from ray._private import log_monitor; from ray.serve._private import constants; "
        "print(constants.CONTROL_LOOP_INTERVAL_S, log_monitor.RAY_LOG_MONITOR_MANY_FILES_THRESHOLD, "
        "log_monitor.LOG_NAME_UPDATE_INTERVAL_S)"
    )
    loop_s, files, names_s = numbers_said(code, model_folder, tmp_path, 3)
    assert 0.25 <= loop_s <= 1
    assert files == 0, "with fewer files it lists the folder ten times a second"
    assert names_s >= 1


def test_serve_gives_its_http_proxy_a_minute_to_start_and_a_manager_that_hangs_seconds(
    model_folder: Path, tmp_path: Path
) -> None:
    code = (
        "from ray.serve._private import deployment_state as state, proxy_state; "
        "print(proxy_state.PROXY_READY_CHECK_TIMEOUT_S, state.DEPLOYMENT_ACTOR_HEALTH_CHECK_PERIOD_S, "
        "state.DEPLOYMENT_ACTOR_HEALTH_CHECK_TIMEOUT_S, state.DEPLOYMENT_ACTOR_HEALTH_CHECK_UNHEALTHY_THRESHOLD)"
    )
    ready_s, period_s, timeout_s, times = numbers_said(code, model_folder, tmp_path, 4)
    assert ready_s == 60
    assert times > 1, "a machine that was asleep is no manager that hangs"
    assert times * timeout_s <= 5
    assert period_s <= 1


def test_ray_does_not_refuse_a_store_for_which_little_memory_is_free_at_the_moment(
    model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ray._private.utils.estimate_available_memory", lambda: 2**30)
    options = ray_options(load_settings({"model": str(model_folder)}), tmp_path)

    def resolved(memory: int | None) -> ResourceAndLabelSpec:
        store = options["object_store_memory"]
        return ResourceAndLabelSpec(num_cpus=1, num_gpus=0, memory=memory, object_store_memory=store).resolve(True)

    with pytest.raises(ValueError, match="less than"):
        resolved(None)
    resolved(options["_memory"])
