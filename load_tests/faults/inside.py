"""Causes a fault inside an actor of a running server: `python -m load_tests.faults.inside GCS_ADDRESS ACTION`.

A process of its own, because a process joins only one Ray cluster. Ray runs a given function inside an actor
(`__ray_call__`, ray 2.60.0), so the server needs no switch for this.
"""

from __future__ import annotations

import sys
from typing import Any

import ray
from ray.util import list_named_actors

NAMESPACE = "serve"


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


def lose_objects() -> None:
    """Free the objects of every segment behind the tier's back."""

    def free_all(tier: Any) -> None:
        from ray._private.internal_api import free

        free([entry[0] for entry in tier._segments.values()])

    for tier in _actors("::cpu_tier::"):
        ray.get(tier.__ray_call__.remote(free_all))


def undo_lose_objects() -> None:
    """Nothing: the tier finds out by itself."""


def break_engine() -> None:
    """Make the engine of one replica raise in its next step."""

    def break_step(replica: Any) -> None:
        import gc

        from deployments.engine_host import EngineThread

        def fail(*args: Any, **kwargs: Any) -> None:
            raise RuntimeError("injected: the engine fails")

        (thread,) = (found for found in gc.get_objects() if type(found) is EngineThread)
        thread.core.step_fn = fail

    ray.get(_actors("#Replica#")[0].__ray_call__.remote(break_step))


def undo_break_engine() -> None:
    """Nothing: Serve replaces the replica."""


def main() -> None:
    """Join the cluster, act, leave."""
    address, action = sys.argv[1:]
    ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    actions = (shrink_tier, undo_shrink_tier, lose_objects, undo_lose_objects, break_engine, undo_break_engine)
    {each.__name__: each for each in actions}[action]()


if __name__ == "__main__":
    main()
