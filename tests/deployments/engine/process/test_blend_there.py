"""An engine in a process of its own blends as one on a thread does, between its steps."""

from __future__ import annotations

import queue
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from live_room import LiveRoom

from deployments.engine.heartbeat import Heartbeat
from deployments.engine.process.core import ReplicaEngineCore
from deployments.protocol.kv_port import BlendTerms, PlanDict, PlannedBlend, PlannedChunk
from deployments.protocol.wire import GenerateRequest
from kvmanager.segments.keys import BLENDED, block_hashes, cache_salt
from load_tests.harness.engine import SECRET, greedy, prompt, until


def test_a_chunk_that_was_saved_there_is_blended_there(live: LiveRoom, tmp_path: Path) -> None:
    chunk = prompt(970, 260)
    tokens = prompt(971, 50) + chunk + prompt(972, 30)
    saved = live.count("crosskv_segments_saved_total")
    live.ask(chunk, max_tokens=1)
    until(lambda: live.count("crosskv_segments_saved_total") >= saved + 2, "the chunk is saved")
    expected, _ = live.ask(tokens)
    stored = live.plan(chunk, tmp_path)
    blend = PlannedBlend(chunks=[PlannedChunk(50, stored["segments"])], ratio=1.0, check_layer=2, seconds=0.0)
    plan = PlanDict(lease_id=9, segments=[], scores=[], now=stored["now"], epoch=stored["epoch"], blend=blend)
    salt = cache_salt(SECRET, live.room.fingerprint, "", BLENDED)
    hashes: list[bytes] = list(block_hashes(tokens, 32, salt))
    request = GenerateRequest("blended", tokens, greedy(8), salt, hashes, fidelity=BLENDED)

    output = live.run(live.answer(request, plan))

    assert list(output.outputs[0].token_ids) == expected
    assert output.num_cached_tokens == (len(tokens) - 1) // 32 * 32, "what follows the chunk is taken along"
    assert live.count("crosskv_blends_total") == 1
    assert live.count("crosskv_blending_available") == 1
    assert live.room.blend_terms == BlendTerms(check_layer=2, layers=6)


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
