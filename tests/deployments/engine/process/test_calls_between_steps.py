"""What the thread of an engine in a process of its own asks of itself, a blend above all, waits for its next step."""

from __future__ import annotations

import queue
import threading
from types import SimpleNamespace
from typing import Any

from deployments.engine.heartbeat import Heartbeat
from deployments.engine.process.core import ReplicaEngineCore


def test_what_the_engine_thread_calls_itself_waits_for_the_next_step() -> None:
    """Else a blend that comes back slice after slice would keep vLLM's queue full, and no step would be made."""
    core: Any = object.__new__(ReplicaEngineCore)
    core.input_queue, core._after_step = queue.Queue(), []
    core._loops, core._thread_id = True, threading.get_ident()
    core.heartbeat, core.on_turn = Heartbeat(), lambda: None
    core.scheduler = SimpleNamespace(has_requests=lambda: True)
    ran: list[int] = []

    def again() -> None:
        ran.append(len(ran))
        core.call(again)

    threading.Thread(target=core.call, args=(again,)).start()
    core._handle_client_request(*core.input_queue.get(timeout=10))
    assert ran == [0]
    assert core.input_queue.empty(), "vLLM makes its step now"
    core._call_what_waits()
    core._handle_client_request(*core.input_queue.get(timeout=10))
    assert ran == [0, 1]
    core._call_what_waits()
    core.scheduler = SimpleNamespace(has_requests=lambda: False)
    core._handle_client_request(*core.input_queue.get(timeout=10))
    assert not core.input_queue.empty(), "without requests there is no step to wait for"
