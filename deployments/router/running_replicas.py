"""What the routers of a process know of its replicas: which run, which are dead before Serve says so, what they lack.

The router of a handle is told by Serve's controller, which asks each replica for its health every two seconds. Ray
tells every process that holds an actor's handle of its death within milliseconds: the local state of the handle is
asked here, without a call to anybody. So a process that routes knows of a death in well under a second, and needs
neither the KV manager nor a request that fails.

Leans on Ray: `ActorHandle._get_local_state`, right once a method of the actor was called, which Serve's router
does for every new replica (`_probe_queue_lens`); a call of a dead actor fails at once, with the cause of its death.
`tests/deployments/router/test_running_replicas.py` holds both.

The router tells, the ingress asks, in one process and on one event loop.
"""

from __future__ import annotations

import asyncio
import functools
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from ray.core.generated.gcs_pb2 import ActorTableData  # type: ignore[attr-defined]  # generated
from ray.exceptions import RayActorError

from deployments.protocol.wire import GenerateRequest

LOOK_AGAIN_S = 0.01
CAUSE_S = 1.0
"""How long the cause of a death that is known may take; Ray has it at hand."""
MOST_GONE = 64
"""Replicas that Serve no longer runs are remembered up to this number: their requests may still ask what happened."""

Lacks = Callable[[GenerateRequest], int | None]


class RunningReplicas:
    """Names of the replicas of one application."""

    def __init__(self) -> None:
        self._handles: Mapping[str, Any] | None = None
        self._gone: OrderedDict[str, Any] = OrderedDict()
        self._listeners: list[Callable[[int], None]] = []

    def listen(self, hear: Callable[[int], None]) -> None:
        """Call `hear` with the number of those that Serve runs whenever it says so, and now if it has said."""
        self._listeners.append(hear)
        if self._handles is not None:
            hear(len(self._handles))

    def tell(self, handles: Mapping[str, Any]) -> None:
        """Serve's controller says that these run, by unique name with Ray's handle of each."""
        for name, handle in (self._handles or {}).items():
            if name not in handles:
                self._gone[name] = handle
        while len(self._gone) > MOST_GONE:
            self._gone.popitem(last=False)
        self._handles = dict(handles)
        for hear in self._listeners:
            hear(len(handles))

    @property
    def listed(self) -> int:
        """Number of replicas that Serve runs, by its last report."""
        return len(self._handles or ())

    def names(self) -> frozenset[str] | None:
        """Names of the replicas that live, as known to this process; None before the first report. O(replicas)."""
        handles = self._handles
        if handles is None:
            return None
        return frozenset(name for name, handle in handles.items() if not _is_dead(handle))

    def is_dead(self, name: str) -> bool:
        """Whether Ray has told of the death of this one, which runs or ran. O(1)."""
        handle = self._handle(name)
        return handle is not None and _is_dead(handle)

    async def death(self, name: str, within_s: float) -> RayActorError | None:
        """Ray's error for this replica's death, with its cause; None when Ray tells of none in `within_s`."""
        handle = self._handle(name)
        if handle is None:
            return None
        end = asyncio.get_running_loop().time() + within_s
        while not _is_dead(handle):
            if asyncio.get_running_loop().time() >= end:
                return None
            await asyncio.sleep(LOOK_AGAIN_S)
        try:
            async with asyncio.timeout(CAUSE_S):
                await handle.get_num_ongoing_requests.remote()
        except RayActorError as error:
            return error
        except TimeoutError:
            return None
        return None

    def _handle(self, name: str) -> Any:
        return (self._handles or {}).get(name) or self._gone.get(name)


def _is_dead(handle: Any) -> bool:
    return bool(handle._get_local_state() == ActorTableData.ActorState.DEAD)


@functools.cache
def running_replicas(app_name: str) -> RunningReplicas:
    """Those of an application, as the routers of this process are told."""
    return RunningReplicas()


class DecodeView:
    """How much of a prompt the best decode replica of one application lacks.

    The router knows, by its mirror; the ingress asks before it sends. Without a router that has been told of replicas
    of both roles there is no answer, and nothing is handed over.
    """

    def __init__(self) -> None:
        self._lacks: Lacks | None = None

    def tell(self, lacks: Lacks) -> None:
        """A router answers from now on."""
        self._lacks = lacks

    def lacking_tokens(self, request: GenerateRequest) -> int | None:
        """Tokens that no device or tier has for the best decode replica; None: there are no roles to speak of."""
        return self._lacks(request) if self._lacks is not None else None


@functools.cache
def decode_view(app_name: str) -> DecodeView:
    """That of an application, as the routers of this process tell it."""
    return DecodeView()
