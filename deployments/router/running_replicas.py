"""Which replicas Serve runs, and which of them are dead before Serve says so.

The router of a handle is told by Serve's controller, which asks each replica for its health every two seconds. Ray
tells every process that holds an actor's handle of its death within milliseconds: the local state of the handle is
asked here, without a call to anybody. So a process that routes knows of a death in well under a second, and needs
neither the KV manager nor a request that fails.

Leans on Ray: `ActorHandle._get_local_state`, right once a method of the actor was called, which Serve's router
does for every new replica (`_probe_queue_lens`); `tests/deployments/router/test_running_replicas.py` holds it.

The router tells, the ingress asks, on two threads of one process: every operation is one step on a mapping.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from ray.core.generated.gcs_pb2 import ActorTableData  # type: ignore[attr-defined]  # generated


class RunningReplicas:
    """Names of the replicas of one application."""

    def __init__(self) -> None:
        self._handles: Mapping[str, Any] | None = None

    def tell(self, handles: Mapping[str, Any]) -> None:
        """Serve's controller says that these run, by unique name with Ray's handle of each."""
        self._handles = dict(handles)

    def names(self) -> frozenset[str] | None:
        """Those that live, as far as this process knows; None before anybody told. O(replicas)."""
        handles = self._handles
        if handles is None:
            return None
        return frozenset(name for name, handle in handles.items() if not _is_dead(handle))


def _is_dead(handle: Any) -> bool:
    return bool(handle._get_local_state() == ActorTableData.ActorState.DEAD)


@functools.cache
def running_replicas(app_name: str) -> RunningReplicas:
    """Those of an application, as the routers of this process are told."""
    return RunningReplicas()
