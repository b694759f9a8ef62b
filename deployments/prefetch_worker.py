"""A prefetch worker: moves sealed segments between Redis and Ray's object store, several per node.

* It is a child of the node's CPU tier and ends with it. The tier calls `read`, so the tier owns the result (DESIGN §7:
  a task's result is owned by the caller), and passes its own objects to `write`.
* Loads never queue behind stores: each has threads of its own.
* It never raises for anything that Redis does. A read answers the segment, verified, or the reason why there is none.
* Bytes read: socket → redis-py's buffer → object store. Bytes written go from the object store to the socket.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deployments.redis_endpoint import RedisEndpoint, open_store
from deployments.segment_store import StoreFullError, StoreTimeoutError, StoreUnavailableError, StoreWrongTypeError
from kvmanager.segment_format import SegmentMismatch

logger = logging.getLogger(__name__)

READ_THREADS = 2
WRITE_THREADS = 1

MISSING = "missing"
UNREACHABLE = "unreachable"
WRONG_TYPE = "wrong_type"
FULL = "full"

Sealed = np.ndarray[Any, np.dtype[np.uint8]]


class PrefetchWorker:
    """See the module's docstring. `label` is for people who read logs."""

    def __init__(self, endpoint: RedisEndpoint, label: str = "") -> None:
        self._store = open_store(endpoint)
        self._deadline_s = endpoint.deadline_s
        self._label = label
        self._blocked_until = 0.0
        self._outage = False

    def __repr__(self) -> str:
        return f"PrefetchWorker({self._label})"

    @ray.method(concurrency_group="read")
    def read(self, key: bytes) -> Sealed | str:
        """The sealed segment as a read-only array, or "missing", "unreachable", "mismatch_<reason>", "wrong_type"."""
        if self._blocked():
            return UNREACHABLE
        try:
            sealed = self._store.get(key)
        except SegmentMismatch as mismatch:
            return f"mismatch_{mismatch.reason.value}"
        except StoreWrongTypeError:
            return WRONG_TYPE
        except StoreUnavailableError as error:
            self._note_outage(error)
            return UNREACHABLE
        self._outage = False
        return MISSING if sealed is None else np.frombuffer(sealed, np.uint8)

    @ray.method(concurrency_group="write")
    def write(self, keys: Sequence[bytes], *buffers: Sealed) -> tuple[int, str]:
        """Store segments, parents first; returns how many of them, from the first on, are stored and why it stopped.

        The reason is "" when all are, else "unreachable" or "full".
        """
        for stored, (key, buffer) in enumerate(zip(keys, buffers, strict=True)):
            if self._blocked():
                return stored, UNREACHABLE
            try:
                self._store.put(key, buffer.data)
            except StoreFullError:
                return stored, FULL
            except StoreUnavailableError as error:
                self._note_outage(error)
                return stored, UNREACHABLE
        self._outage = False
        return len(keys), ""

    def _blocked(self) -> bool:
        """After a timeout, what has queued up meanwhile is answered at once: each would wait as long in its turn."""
        return time.monotonic() < self._blocked_until

    def _note_outage(self, error: StoreUnavailableError) -> None:
        if isinstance(error, StoreTimeoutError):
            self._blocked_until = time.monotonic() + self._deadline_s
        if not self._outage:
            logger.warning("%s (logged once per outage)", error)
        self._outage = True


def start_worker(app_name: str, node_id: str, number: int, endpoint: RedisEndpoint) -> Any:
    """A new worker on a node, owned by the calling actor. It has no Ray name, which a successor might find taken."""
    options: dict[str, Any] = {
        "num_cpus": 0,
        "max_restarts": 0,  # a call to a worker that Ray starts again would wait for it; the pool starts another
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
    }
    groups: dict[str, Any] = {"concurrency_groups": {"read": READ_THREADS, "write": WRITE_THREADS}}
    return (
        ray.remote(**groups)(PrefetchWorker)
        .options(**options)
        .remote(endpoint, f"{app_name}, node {node_id[:8]}, {number}")
    )
