"""A prefetch worker: moves sealed segments between Redis and Ray's object store, several per node.

* It is a child of the node's CPU tier and ends with it. The tier calls `read`, so the tier owns the result (DESIGN §7:
  a task's result is owned by the caller), and passes its own objects to `write`.
* Loads never queue behind stores: each has threads of its own.
* One connection for reads: while one segment comes over it, the thread of the one before decodes that and puts it into
  the object store. So a pool of k workers reads over k connections, and its owner decides how many are worth while.
* It never raises for anything that Redis does. A read answers the segment, verified, or the reason why there is none.
* Segments are coded in Redis and raw in the object store (`deployments.segment_store.coded_store`). Bytes read: socket
→ redis-py's
  buffer → raw segment → object store. Bytes written: object store → coded segment → socket; raw ones without a copy.
* Everything read is verified here already, though the replica does it again before use: what is damaged must neither
  lie in the CPU tier nor be copied from there to another Redis. It costs a few per cent of what reading costs.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from deployments.segment_store.base import StoreFullError, StoreTimeoutError, StoreUnavailableError, StoreWrongTypeError
from deployments.segment_store.codec_meter import CodecMeter
from deployments.segment_store.endpoint import RedisEndpoint, open_coded_store
from kvmanager.segments.format import Buffer, SegmentMismatch
from kvmanager.segments.forms import stated_form

logger = logging.getLogger(__name__)

READ_THREADS = 2
"""One at the connection, one at the decoder and the object store."""
WRITE_THREADS = 1

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_KEPT_BYTES = 256 << 20
"""Freed memory that the process keeps for its next segment at most. It never uses more than a few segments' worth."""

MISSING = "missing"
UNREACHABLE = "unreachable"
WRONG_TYPE = "wrong_type"
FULL = "full"
DAMAGED = "damaged"

Sealed = np.ndarray[Any, np.dtype[np.uint8]]


class PrefetchWorker:
    """See the module's docstring. `label` names it in logs."""

    def __init__(self, endpoint: RedisEndpoint, label: str = "") -> None:
        keep_freed_memory()
        self._meter = CodecMeter(endpoint.coding.codecs)
        self._store = open_coded_store(endpoint, self._meter)
        self._connection = threading.Lock()
        self._deadline_s = endpoint.deadline_s
        self._label = label
        self._blocked_until = 0.0
        self._outage = False

    def __repr__(self) -> str:
        return f"PrefetchWorker({self._label})"

    @ray.method(concurrency_group="read")
    def read(self, key: bytes) -> Sealed | str:
        """The sealed segment as a read-only array, raw, or as it is stored where that is not dense.

        Or "missing", "unreachable", "mismatch_<reason>", "wrong_type".
        """
        with self._connection:
            stored = self._fetch(key)
        return stored if isinstance(stored, str) else self._decoded(key, stored)

    @ray.method(concurrency_group="write")
    def write(self, keys: Sequence[bytes], *buffers: Sealed) -> tuple[list[int], str, dict[bytes, bytes]]:
        """Store segments, parents first; return the bytes in Redis of each one stored, why it stopped, and the forms
        (`kvmanager.segments.forms`) of those that are not dense there.

        The reason is "" when all are stored, else "unreachable", "full", or "damaged" for what is no sealed segment.
        """
        stored: list[int] = []
        forms: dict[bytes, bytes] = {}
        for key, buffer in zip(keys, buffers, strict=True):
            if self._blocked():
                return stored, UNREACHABLE, forms
            try:
                nbytes, form = self._store.put_by_tail(key, buffer.data)
            except SegmentMismatch:
                return stored, DAMAGED, forms
            except StoreFullError:
                return stored, FULL, forms
            except StoreUnavailableError as error:
                self._note_outage(error)
                return stored, UNREACHABLE, forms
            stored.append(nbytes)
            if form:
                forms[key] = form
        self._outage = False
        return stored, "", forms

    @ray.method(concurrency_group="report")
    def codec_report(self) -> dict[str, dict[str, Any]]:
        """See `CodecMeter.report`."""
        return self._meter.report()

    @ray.method(concurrency_group="life")
    def live(self) -> None:
        """Never answer: the owner's pending call fails as soon as this worker dies."""
        threading.Event().wait()

    def _fetch(self, key: bytes) -> Buffer | str:
        """The segment as it is stored, or why not."""
        if self._blocked():
            return UNREACHABLE
        try:
            stored = self._store.fetch(key)
        except SegmentMismatch as mismatch:
            return f"mismatch_{mismatch.reason.value}"
        except StoreWrongTypeError:
            return WRONG_TYPE
        except StoreUnavailableError as error:
            self._note_outage(error)
            return UNREACHABLE
        self._outage = False
        return MISSING if stored is None else stored

    def _decoded(self, key: bytes, stored: Buffer) -> Sealed | str:
        """The raw segment, or why not; one that is not dense stays as it is."""
        if stated_form(stored):
            return np.frombuffer(stored, np.uint8)
        try:
            return np.frombuffer(self._store.decode(key, stored), np.uint8)
        except SegmentMismatch as mismatch:
            return f"mismatch_{mismatch.reason.value}"
        except StoreUnavailableError as error:
            self._note_outage(error)
            return UNREACHABLE

    def _blocked(self) -> bool:
        """After a timeout, what has queued up meanwhile is answered at once: each would wait as long in its turn."""
        return time.monotonic() < self._blocked_until

    def _note_outage(self, error: StoreUnavailableError) -> None:
        if isinstance(error, StoreTimeoutError):
            self._blocked_until = time.monotonic() + self._deadline_s
        if not self._outage:
            logger.warning("%s (logged once per outage)", error)
        self._outage = True


def keep_freed_memory() -> None:
    """Let glibc keep what a segment has occupied for the next one, instead of giving it back to the kernel.

    Else each segment's buffers are mapped again, and the page faults take four times as long as the copying (7 ms
    instead of 1.6 for 3 MB, on a virtual machine). Where there is no glibc all stays as it is.
    """
    with contextlib.suppress(OSError, AttributeError):
        libc = ctypes.CDLL("libc.so.6")
        libc.mallopt(_M_MMAP_THRESHOLD, _KEPT_BYTES)
        libc.mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES)


def start_worker(app_name: str, node_id: str, number: int, endpoint: RedisEndpoint) -> Any:
    """A new worker on a node, owned by the calling actor. It has no Ray name, which a successor might find taken."""
    options: dict[str, Any] = {
        "num_cpus": 0,
        "max_restarts": 0,  # a call to a worker that Ray starts again would wait for it; the pool starts another
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id=node_id, soft=False),
    }
    threads = {"read": READ_THREADS, "write": WRITE_THREADS, "life": 1, "report": 1}
    options_of_class: dict[str, Any] = {"concurrency_groups": threads}
    return (
        ray.remote(**options_of_class)(PrefetchWorker)
        .options(**options)
        .remote(endpoint, f"{app_name}, node {node_id[:8]}, {number}")
    )
