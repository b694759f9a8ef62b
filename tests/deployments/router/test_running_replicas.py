"""A process that routes knows which replicas live without asking anybody: real actors of Ray that are killed."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import pytest
import ray
from ray import cloudpickle

from deployments.router.running_replicas import RunningReplicas, running_replicas

pytestmark = pytest.mark.server
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import a test


class Mortal:
    def pid(self) -> int:
        return os.getpid()


def test_a_killed_actor_is_gone_without_a_call_to_it_and_the_others_stay(ray_cluster: Any) -> None:
    actors = {name: ray.remote(Mortal).options(num_cpus=0).remote() for name in "ab"}
    pids = {name: ray.get(actor.pid.remote()) for name, actor in actors.items()}
    running = RunningReplicas()
    assert running.names() is None, "nobody has told"
    running.tell(actors)
    assert running.names() == {"a", "b"}

    os.kill(pids["a"], signal.SIGKILL)

    end = time.monotonic() + 30
    while running.names() == {"a", "b"}:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert running.names() == {"b"}
    running.tell({})
    assert running.names() == frozenset()


def test_routers_and_ingress_of_one_process_speak_of_the_same_list() -> None:
    assert running_replicas("app") is running_replicas("app")
    assert running_replicas("app") is not running_replicas("other")
