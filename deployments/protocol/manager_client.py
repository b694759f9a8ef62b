"""Finds the KV-manager actor by name and finds it again after it was recreated.

Leans on Ray: Serve names a deployment-scoped actor
`SERVE_DEPLOYMENT_ACTOR::{app}::{deployment}::{version}::{name}` in the namespace "serve"; only its own deployment can
ask for it by API (`serve.get_deployment_actor`), while the ingress, the router and the tiers live elsewhere, so the
name is looked up in the list of named actors.
"""

from __future__ import annotations

import asyncio
import collections
import functools
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import ray
from ray.util import list_named_actors

from deployments.protocol.actor_finder import SEARCH_S, ActorFinder
from deployments.protocol.call_batches import BATCHED, CallFailedError, CallQueue

MANAGER_ACTOR = "kv_manager"
SERVE_NAMESPACE = "serve"
DIRECTIVES_WAIT_S = 2.0
"""How long a replica's poll for directives waits at the manager."""
MANAGER_ANSWER_S = 5.0
"""How long a part waits for an answer that it can go on without, on top of the wait that it asks of the manager."""
MOST_TOLD = 256
"""Calls that were told and have not been carried out. A manager that hangs is told no more: Ray would keep them all."""


class ManagerUnavailableError(Exception):
    """The manager is gone, or did not answer in time. The caller goes on without it."""


class ManagerClient:
    """A handle on the manager that survives the manager. Safe from any thread."""

    def __init__(self, app_name: str) -> None:
        self._finder = ActorFinder(lambda: _find_actor(app_name))
        self._lock = threading.Lock()
        self._queues: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, CallQueue] = weakref.WeakKeyDictionary()
        self._told: collections.deque[Any] = collections.deque()

    async def ask(self, method: str, *args: Any, timeout_s: float, late: Callable[[Any], None] | None = None) -> Any:
        """Call and await a method, together with others where that may be. Raises ManagerUnavailableError.

        `late` hears, on this loop, an answer whose asker no longer waits: what it grants is to be given back.
        """
        handle = self._finder.handle
        try:
            async with asyncio.timeout(timeout_s):
                if handle is None:
                    handle = await self._search()
                if method in BATCHED:
                    answer = awaited = self._queue_for(handle).call(method, args, late)
                else:
                    answer = asyncio.ensure_future(getattr(handle, method).remote(*args))
                    awaited = asyncio.shield(answer)
                try:
                    return await awaited
                except asyncio.CancelledError:
                    if late is None:
                        answer.cancel()
                    else:
                        answer.add_done_callback(functools.partial(_hear, late))
                    raise
        except TimeoutError as error:
            raise ManagerUnavailableError(f"the KV manager did not answer {method} within {timeout_s} s") from error
        except (ray.exceptions.RayError, CallFailedError) as error:
            raise self._lost(handle, error) from error

    def ask_blocking(self, method: str, *args: Any, timeout_s: float, late: Callable[[Any], None] | None = None) -> Any:
        """The same from a thread that is not an event loop's; `late` is called in one of Ray's and returns at once.

        Raises ManagerUnavailableError.
        """
        deadline = time.monotonic() + timeout_s
        handle = self.find(timeout_s)
        answer: Any = None
        try:
            answer = getattr(handle, method).remote(*args)
            return ray.get(answer, timeout=max(0.0, deadline - time.monotonic()))
        except ray.exceptions.GetTimeoutError as error:
            if late is not None:
                answer.future().add_done_callback(functools.partial(_hear, late))
            raise ManagerUnavailableError(f"the KV manager did not answer {method} within {timeout_s} s") from error
        except ray.exceptions.RayError as error:
            raise self._lost(handle, error) from error

    def tell(self, method: str, *args: Any) -> None:
        """Call a method and do not wait for it. Raises ManagerUnavailableError when the manager is not known.

        On an event loop it does not wait for a search either; another thread waits `SEARCH_S` at the longest. Raises
        it too while `MOST_TOLD` calls have not been carried out.
        """
        handle = self._finder.handle
        if handle is None:
            try:
                asyncio.get_running_loop()
            except RuntimeError:
                handle = self.find(SEARCH_S)
            else:
                self._finder.search()
                raise ManagerUnavailableError("the KV manager is being looked for")
        with self._lock:
            if len(self._told) >= MOST_TOLD:
                _, left = ray.wait(list(self._told), num_returns=len(self._told), timeout=0, fetch_local=False)
                self._told = collections.deque(left)
                if len(left) >= MOST_TOLD:
                    raise ManagerUnavailableError(f"the KV manager has not carried out {len(left)} calls yet")
        try:
            told = getattr(handle, method).remote(*args)
        except ray.exceptions.RayError as error:
            raise self._lost(handle, error) from error
        with self._lock:
            self._told.append(told)

    def tell_together(self, calls: Sequence[tuple[str, Sequence[Any]]]) -> None:
        """The same for calls (method of `BATCHED`, arguments), carried out in order; none of them stops the others."""
        self.tell("batch", *calls)

    def find(self, timeout_s: float) -> Any:
        """The manager's handle, for a thread that may wait. Raises ManagerUnavailableError."""
        try:
            return self._finder.wait(timeout_s)
        except TimeoutError as error:
            raise ManagerUnavailableError("the KV manager was not found in time") from error

    async def _search(self) -> Any:
        try:
            async with asyncio.timeout(SEARCH_S):
                return await asyncio.shield(asyncio.wrap_future(self._finder.search()))
        except TimeoutError as error:
            raise ManagerUnavailableError("the KV manager was not found in time") from error

    def _queue_for(self, handle: Any) -> CallQueue:
        """This event loop's queue of calls to a manager; a new manager gets a new one."""
        loop = asyncio.get_running_loop()
        with self._lock:
            queue = self._queues.get(loop)
            if queue is None or queue.handle is not handle:
                queue = self._queues[loop] = CallQueue(handle)
            return queue

    def _lost(self, handle: Any, error: Exception) -> ManagerUnavailableError:
        if isinstance(error, ray.exceptions.RayActorError):
            self._finder.lost(handle)
        return ManagerUnavailableError(f"the KV manager failed: {error}")


def _hear(late: Callable[[Any], None], answer: Any) -> None:
    """Tell `late` what has come; a future that was cancelled, or a call that failed, brings nothing."""
    if not answer.cancelled() and answer.exception() is None:
        late(answer.result())


def _find_actor(app_name: str) -> Any:
    app_part, name_part = f"::{app_name}::", f"::{MANAGER_ACTOR}"
    try:
        for actor in list_named_actors(all_namespaces=True):
            name = actor["name"]
            if actor["namespace"] == SERVE_NAMESPACE and app_part in name and name.endswith(name_part):
                return ray.get_actor(name, namespace=SERVE_NAMESPACE)
    except Exception as error:
        raise ManagerUnavailableError(f"the KV manager is being recreated: {error}") from error
    raise ManagerUnavailableError("the KV manager is not running")
