"""Ray knows the names of the options, and they are what its handles and replicas do."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from app.builder import build
from deployments.replica.serve_process import LONGEST_MESSAGE_BYTES, SERVE_OPTIONS

READ = """
import json
from ray.serve._private import constants, handle_options, replica
names = {name: getattr(constants, name) for name in json.loads(input())}
print(json.dumps({
    **names,
    "separate_loop": handle_options.InitHandleOptions()._run_router_in_separate_loop,
    "by_reference": handle_options.DynamicHandleOptions()._by_reference,
    "separate_thread": replica.RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD,
}))
"""


def read(environment: dict[str, str]) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, "-c", READ],
        input=json.dumps(list(SERVE_OPTIONS)),
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_ray_reads_every_option_and_does_otherwise_without() -> None:
    plain = {name: value for name, value in os.environ.items() if name not in SERVE_OPTIONS}
    assert read({**plain, **SERVE_OPTIONS}) == {
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": False,
        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": False,
        "RAY_SERVE_USE_GRPC_BY_DEFAULT": True,
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": LONGEST_MESSAGE_BYTES,
        "RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE": 100,
        "separate_loop": False,
        "by_reference": False,
        "separate_thread": False,
    }
    without = read(plain)
    assert [without[name] for name in ("separate_loop", "by_reference", "separate_thread")] == [True, True, True]
    assert without["RAY_SERVE_REQUEST_PATH_LOG_BUFFER_SIZE"] == 1


@pytest.mark.parametrize("name", ["Ingress", "Replica"])
def test_both_deployments_have_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.builder.check_cluster", lambda settings: None)
    ingress: Any = build({"kv": {"enabled": False}})._bound_deployment
    deployments = {"Ingress": ingress, "Replica": ingress.init_args[2]._bound_deployment}
    environment = deployments[name].ray_actor_options["runtime_env"]["env_vars"]
    assert SERVE_OPTIONS.items() <= environment.items()
