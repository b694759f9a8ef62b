"""A process that routes knows which replicas live without asking anybody: real actors of Ray that are killed."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from typing import Any

import pytest
import ray
from ray import cloudpickle

from deployments.router.running_replicas import MOST_GONE, RunningReplicas, running_replicas
from load_tests.harness.patience import patience

pytestmark = pytest.mark.server
cloudpickle.register_pickle_by_value(sys.modules[__name__])  # Ray's workers cannot import a test


class Mortal:
    def pid(self) -> int:
        return os.getpid()

    def get_num_ongoing_requests(self) -> int:
        """As an actor of Serve has it."""
        return 0


def test_a_killed_actor_is_gone_without_a_call_to_it_and_the_others_stay(ray_cluster: Any) -> None:
    actors = {name: ray.remote(Mortal).options(num_cpus=0).remote() for name in "ab"}
    pids = {name: ray.get(actor.pid.remote()) for name, actor in actors.items()}
    running = RunningReplicas()
    assert running.names() is None, "nobody has told"
    running.tell(actors)
    assert running.names() == {"a", "b"}

    os.kill(pids["a"], signal.SIGKILL)

    end = time.monotonic() + patience(30)
    while running.names() == {"a", "b"}:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert running.names() == {"b"}
    running.tell({})
    assert running.names() == frozenset()


@pytest.mark.parametrize("meant", [True, False])
def test_a_death_is_told_with_its_cause_also_of_an_actor_that_serve_no_longer_runs(
    ray_cluster: Any, meant: bool
) -> None:
    actors = {name: ray.remote(Mortal).options(num_cpus=0).remote() for name in "ab"}
    pid, _ = [ray.get(actor.pid.remote()) for actor in actors.values()]
    running = RunningReplicas()
    running.tell(actors)
    running.tell({"b": actors["b"]})
    if meant:
        ray.kill(actors["a"])
    else:
        os.kill(pid, signal.SIGKILL)

    async def deaths() -> list[Any]:
        return [await running.death(name, within_s) for name, within_s in (("a", 30.0), ("b", 0.0), ("nobody", 0.0))]

    of_a, *others = asyncio.run(deaths())
    assert isinstance(of_a, ray.exceptions.ActorDiedError)
    assert ("ray.kill" in str(of_a)) is meant
    assert others == [None, None]
    assert (running.is_dead("a"), running.is_dead("b"), running.is_dead("nobody")) == (True, False, False)


def test_only_so_many_of_the_gone_are_remembered() -> None:
    running = RunningReplicas()
    for number in range(MOST_GONE + 3):
        running.tell({str(number): object()})
    assert len(running._gone) == MOST_GONE


def test_routers_and_ingress_of_one_process_speak_of_the_same_list() -> None:
    assert running_replicas("app") is running_replicas("app")
    assert running_replicas("app") is not running_replicas("other")
