"""How Ray is started: its agents are given their ports, and a Ray that has not come up is started once more.

A raylet of Ray 2.60 lets its two agents choose their ports, and gives each 15 s to tell them. One that takes longer
ends the raylet, and `ray.init` waits for it in vain (ray-project/ray#65983). Agents are Python programs that import
much: on a crowded machine, or from a cold disk, they take longer. No setting of Ray's changes the 15 s, and `ray.init`
has no argument for the ports. So this module leans on `ray._private.services`: on the keywords of `start_raylet` that
are ports, and on the arguments of `start_ray_process`, for `start_raylet` does not pass on one of them.
"""

from __future__ import annotations

import contextlib
import shutil
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import ray
from ray._private import services

from app.launch.descendants import Descendants
from app.launch.ports import free_port

_LISTENS = "dashboard_agent_listen_port"
AGENT_PORTS = ("metrics_agent_port", "metrics_export_port", "runtime_env_agent_port", _LISTENS)
"""Keywords of `start_raylet`, and options of the raylet."""
_RAYLET = "raylet"
"""The name of that kind of process in `start_ray_process`."""
_AGENT_TIME = {"RAY_agent_register_timeout_ms": "120000"}
"""How long a raylet waits for the agent that sets up what an actor asked for, once one does: 30 s unless told."""


def start_ray(options: Mapping[str, Any]) -> None:
    """Start Ray with these arguments of `ray.init`, and once more where it has not come up.

    One of its daemons may hang or die as it starts, on a machine that is busy with something else. Ray gives up then.
    Raises what Ray raises the second time.
    """
    with agents_given_ports():
        try:
            ray.init(**options)
            return
        except Exception as error:
            print(f"Ray has not come up, and is started once more. It said: {error}", flush=True)
        end_all(Path(options["_temp_dir"]))
        ray.init(**options)


def end_all(ray_folder: Path) -> None:
    """End Ray and whatever it has started, and delete what is left of it."""
    descendants = Descendants(psutil.Process())
    descendants.note()
    ray.shutdown()
    descendants.end(threading.Event())
    shutil.rmtree(ray_folder, ignore_errors=True)


def _free_ports() -> set[int]:
    """As many ports as agents need, no two alike."""
    found: set[int] = set()
    while len(found) < len(AGENT_PORTS):
        found.add(free_port())
    return found


@contextlib.contextmanager
def agents_given_ports() -> Iterator[None]:
    """Inside, a raylet that this process starts gives its agents ports that are free now, and waits for no agent."""
    start_raylet, start_process = services.start_raylet, services.start_ray_process

    def with_ports(*given: Any, **named: Any) -> Any:
        """`start_raylet`, with a port for each that was left open."""
        ports = {name: named.get(name) or port for name, port in zip(AGENT_PORTS, _free_ports(), strict=True)}

        def told(command: list[str], kind: str, *more: Any, **how: Any) -> Any:
            """`start_ray_process`, which tells the raylet what `start_raylet` tells the agent alone."""
            if kind == _RAYLET:
                command = [*command, f"--{_LISTENS}={ports[_LISTENS]}"]
                how["env_updates"] = _AGENT_TIME | (how.get("env_updates") or {})
            return start_process(command, kind, *more, **how)

        with mock.patch.object(services, "start_ray_process", told):
            return start_raylet(*given, **(named | ports))

    with mock.patch.object(services, "start_raylet", with_ports):
        yield
