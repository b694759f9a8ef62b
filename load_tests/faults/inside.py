"""Causes faults inside the actors of a running server, without a switch in the server.

`Inside` starts this module as a process of its own, because a process joins only one Ray cluster; it acts on each line
that it reads. Leans on ray 2.60.0: `__ray_call__`, which runs a function inside an actor, and on where Serve keeps the
deployment's object.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.util import list_named_actors

from configs.model_folder import PROJECT_ROOT
from load_tests.harness.server import RunningServer, ServerError

NAMESPACE = "serve"
DONE = "done"
NOTICED_S = 20.0


def _actors(part: str) -> list[Any]:
    names = [actor["name"] for actor in list_named_actors(all_namespaces=True) if part in actor["name"]]
    return [ray.get_actor(name, namespace=NAMESPACE) for name in names]


def shrink_tier() -> None:
    """Give every CPU tier a tenth of its budget."""
    for tier in _actors("::cpu_tier::"):
        stats = ray.get(tier.stats.remote())
        ray.get(tier.resize.remote(stats["budget_bytes"] // 10))


def undo_shrink_tier() -> None:
    """Give it back."""
    for tier in _actors("::cpu_tier::"):
        stats = ray.get(tier.stats.remote())
        ray.get(tier.resize.remote(stats["budget_bytes"] * 10))


class Owner:
    """An actor that owns an object, and is killed with it."""

    def put(self) -> list[Any]:
        """A reference, in a list so that it stays one."""
        return [ray.put(bytes(200_000))]


def lose_objects() -> None:
    """Put references to a lost object in the place of every segment's, behind the tier's back."""
    owner: Any = ray.remote(Owner).options(num_cpus=0).remote()
    lost = ray.get(owner.put.remote())
    ray.kill(owner)
    deadline = time.monotonic() + NOTICED_S
    with contextlib.suppress(ray.exceptions.ObjectLostError):
        while time.monotonic() < deadline:  # until Ray has noticed
            ray.get(lost)
            time.sleep(0.05)

    def replace_all(tier: Any, lost: list[Any]) -> None:
        tier._segments = {key: (lost[0], *entry[1:]) for key, entry in tier._segments.items()}

    for tier in _actors("::cpu_tier::"):
        ray.get(tier.__ray_call__.remote(replace_all, lost))


def break_engine() -> None:
    """Make the engine of one replica raise in its next step; of one that has requests where there is one."""
    _strike_one("break_step")


def hang_engine() -> None:
    """Make the engine of one replica, chosen in the same way, hang in its next step, and never come back."""
    _strike_one("hang_step")


def lose_replies() -> None:
    """Lose every answer of the manager to what the replicas' ports ask, after it was carried out."""
    _lose_port_answers(1.0)


def undo_lose_replies() -> None:
    """Have them hear again."""
    _lose_port_answers(0.0)


def lose_some_replies(share: float) -> None:
    """Lose this share of the manager's answers to all that the replicas ask. For good."""

    def wrap(actor: Any) -> None:
        from load_tests.faults.lost_answers import lose_answers

        lose_answers(_replica(actor)._manager, share)

    _in_replicas(wrap)
    _lose_port_answers(share)


def _lose_port_answers(share: float) -> None:
    def wrap(actor: Any) -> None:
        from load_tests.faults.inside_engine import in_engine, is_process, lose_port_answers

        handle, application = _handle(actor), _application(actor)
        in_engine(handle, lose_port_answers, application, share)
        if is_process(handle):  # the replica has a port of its own then, for plans
            lose_port_answers(None, handle._port, application, share)

    _in_replicas(wrap)


def disturb_redis(error_share: float, corrupt_share: float) -> None:
    """Let calls to Redis fail and reads be damaged, in every process. For as long as the Redis tier's actor lives.

    Returns when the prefetch workers meet them.
    """

    def act(tier: Any) -> None:
        from load_tests.harness.disturbed_redis import StoreFaults, disturbed

        tier._config = disturbed(tier._config, StoreFaults(error_share, corrupt_share))
        tier._start_over.set()

    def has_come(tier: Any) -> bool:
        return hasattr(tier._redis._endpoint, "disturbance") and bool(tier._redis.settled)

    for tier in _actors("::redis_tier"):
        ray.get(tier.__ray_call__.remote(act))
    deadline = time.monotonic() + NOTICED_S
    for tier in _actors("::cpu_tier::"):
        while not ray.get(tier.__ray_call__.remote(has_come)):
            if time.monotonic() > deadline:
                raise TimeoutError("the CPU tier has not heard of the disturbed Redis")
            time.sleep(0.05)


def make_engines_mortal(deadly_tokens: list[int]) -> None:
    """Let the engines that there are now end with any prompt that holds this run of tokens."""

    def act(actor: Any) -> None:
        from load_tests.faults.inside_engine import die_of, in_engine

        in_engine(_handle(actor), die_of, deadly_tokens)

    _in_replicas(act)


def _strike_one(fault: str) -> None:
    """Where a request runs: it is waited for, so that the fault shows at once."""

    def strike_if_busy(actor: Any) -> bool:
        from load_tests.faults import inside_engine

        handle = _handle(actor)
        busy = bool(handle._begun)
        if busy:
            inside_engine.in_engine(handle, getattr(inside_engine, fault))
        return busy

    deadline = time.monotonic() + NOTICED_S
    while not any(ray.get(actor.__ray_call__.remote(strike_if_busy)) for actor in _actors("#Replica#")):
        if time.monotonic() > deadline:
            raise TimeoutError("no replica has a request")
        time.sleep(0.02)


def _in_replicas(act: Callable[[Any], None]) -> None:
    def is_done(actor: Any) -> bool:
        from load_tests.faults.inside_engine import is_carried_out

        return is_carried_out(_handle(actor))

    for actor in _actors("#Replica#"):
        ray.get(actor.__ray_call__.remote(act))
        while not ray.get(actor.__ray_call__.remote(is_done)):
            time.sleep(0.02)


def _replica(actor: Any) -> Any:
    return actor._replica_impl._user_callable_wrapper._callable


def _handle(actor: Any) -> Any:
    return _replica(actor)._engine


def _application(actor: Any) -> str:
    return str(actor._replica_impl._deployment_id.app_name)


class Inside:
    """A process that has joined a server's cluster."""

    def __init__(self, server: RunningServer) -> None:
        command = [sys.executable, "-m", "load_tests.faults.inside", server.gcs_address()]
        self._process = subprocess.Popen(
            command,
            cwd=PROJECT_ROOT,
            env={**os.environ, **server.ray_environment()},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        self._answer()

    def do(self, action: str, *args: Any) -> None:
        """Call a function of this module and wait for its end; `args` are JSON's. Raises ServerError if it fails."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([action, *args]) + "\n")
        self._process.stdin.flush()
        self._answer()

    def close(self) -> None:
        """Leave the cluster."""
        self._process.kill()
        self._process.wait()

    def _answer(self) -> None:
        assert self._process.stdout is not None
        answer = self._process.stdout.readline().strip()
        if answer != DONE:
            raise ServerError(f"the server's actors could not be reached: {answer or 'the process ended'}")


def main() -> None:
    """Join the cluster; act on each line."""
    ray.init(address=sys.argv[1], namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    # Ray's first calls take a second, in which the requests that a fault should strike would end.
    _in_replicas(lambda actor: None)
    print(DONE, flush=True)
    for line in sys.stdin:
        try:
            action, *args = json.loads(line)
            globals()[action](*args)
            print(DONE, flush=True)
        except Exception as error:
            print(repr(error).replace("\n", " "), flush=True)


if __name__ == "__main__":
    main()
