"""Finds the KV-manager actor by name and finds it again after it was recreated.

Leans on ray 2.60.0: Serve names a deployment-scoped actor
`SERVE_DEPLOYMENT_ACTOR::{app}::{deployment}::{version}::{name}` in the namespace "serve"; only its own deployment can
ask for it by API (`serve.get_deployment_actor`), while the ingress, the router and the tiers live elsewhere, so the
name is looked up in the list of named actors.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections.abc import Sequence
from typing import Any

import ray
from ray.util import list_named_actors

from deployments.call_batches import BATCHED, CallFailedError, CallQueue

MANAGER_ACTOR = "kv_manager"
SERVE_NAMESPACE = "serve"
LOOKUP_PAUSE_S = 0.25
"""Least time between two searches by name, so that a manager that is gone costs each caller next to nothing."""


class ManagerUnavailableError(Exception):
    """The manager is gone, or did not answer in time. The caller goes on without it."""


class ManagerClient:
    """A handle on the manager that survives the manager. Safe from any thread."""

    def __init__(self, app_name: str) -> None:
        self._app_name = app_name
        self._handle: Any = None
        self._next_lookup = 0.0
        self._queues: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, CallQueue] = weakref.WeakKeyDictionary()

    async def ask(self, method: str, *args: Any, timeout_s: float) -> Any:
        """Call and await a method, together with others where that may be. Raises ManagerUnavailableError."""
        handle = self._find()
        try:
            if method in BATCHED:
                return await asyncio.wait_for(self._queue_for(handle).call(method, args), timeout_s)
            return await asyncio.wait_for(getattr(handle, method).remote(*args), timeout_s)
        except TimeoutError as error:
            raise ManagerUnavailableError(f"the KV manager did not answer {method} within {timeout_s} s") from error
        except (ray.exceptions.RayError, CallFailedError) as error:
            raise self._lost(error) from error

    def ask_blocking(self, method: str, *args: Any, timeout_s: float) -> Any:
        """The same from a thread that is not an event loop's. Raises ManagerUnavailableError."""
        handle = self._find()
        try:
            return ray.get(getattr(handle, method).remote(*args), timeout=timeout_s)
        except ray.exceptions.GetTimeoutError as error:
            raise ManagerUnavailableError(f"the KV manager did not answer {method} within {timeout_s} s") from error
        except ray.exceptions.RayError as error:
            raise self._lost(error) from error

    def tell(self, method: str, *args: Any) -> None:
        """Call a method and do not wait. Raises ManagerUnavailableError when the manager is known to be gone."""
        try:
            getattr(self._find(), method).remote(*args)
        except ray.exceptions.RayError as error:
            raise self._lost(error) from error

    def tell_together(self, calls: Sequence[tuple[str, Sequence[Any]]]) -> None:
        """The same for calls (method of `BATCHED`, arguments), carried out in order; none of them stops the others."""
        self.tell("batch", *calls)

    def _queue_for(self, handle: Any) -> CallQueue:
        """This event loop's queue of calls to a manager; a new manager gets a new one."""
        loop = asyncio.get_running_loop()
        queue = self._queues.get(loop)
        if queue is None or queue.handle is not handle:
            queue = self._queues[loop] = CallQueue(handle)
        return queue

    def _find(self) -> Any:
        if self._handle is None:
            now = time.monotonic()
            if now < self._next_lookup:
                raise ManagerUnavailableError("the KV manager is not running")
            self._next_lookup = now + LOOKUP_PAUSE_S
            self._handle = _find_actor(self._app_name)
        return self._handle

    def _lost(self, error: Exception) -> ManagerUnavailableError:
        if isinstance(error, ray.exceptions.RayActorError):
            self._handle = None
        return ManagerUnavailableError(f"the KV manager failed: {error}")


def _find_actor(app_name: str) -> Any:
    app_part, name_part = f"::{app_name}::", f"::{MANAGER_ACTOR}"
    try:
        for actor in list_named_actors(all_namespaces=True):
            name = actor["name"]
            if actor["namespace"] == SERVE_NAMESPACE and app_part in name and name.endswith(name_part):
                return ray.get_actor(name, namespace=SERVE_NAMESPACE)
    except (ValueError, ray.exceptions.RayError) as error:
        raise ManagerUnavailableError("the KV manager is being recreated") from error
    raise ManagerUnavailableError("the KV manager is not running")
