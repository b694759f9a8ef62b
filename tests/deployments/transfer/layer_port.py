"""A port that brings segments layer by layer, with a test in control; and an engine asked over it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from live_engine import PATIENCE_S, LiveEngine

from deployments.protocol.kv_port import LayerArrival
from kvmanager.moves.plan import PlannedLoad
from kvmanager.segments.format import read_header
from load_tests.harness.memory_port import MemoryPort
from load_tests.harness.patience import patience, until

LENGTH = 500  # 15 full blocks: segments of 4, 4, 4 and 3 blocks
LAYERS = 6


class LayerPort(MemoryPort):
    """Brings each segment into a buffer of its own, a group of layers at a time; what has not come yet is zeros.

    `before_group(segment, group)` may block or raise in the load thread; `damaged` names the (segment, layer) in which
    a bit is flipped on the way.
    """

    def __init__(self) -> None:
        super().__init__()
        self.before_group: Callable[[int, int], None] = lambda segment, group: None
        self.damaged: set[tuple[int, int]] = set()
        self.arrivals: list[tuple[int, int]] = []
        self.layer_fetches = 0

    def fetch_layers(
        self, loads: Sequence[PlannedLoad], group_ends: Sequence[int], deadline: float
    ) -> Iterator[LayerArrival]:
        self.layer_fetches += 1
        stored = [self.segments[load.key][1] if load.key in self.segments else None for load in loads]
        buffers = [bytearray(len(sealed or b"")) for sealed in stored]
        for group, (start, end) in enumerate(zip((0, *group_ends), group_ends, strict=False)):
            for number, (sealed, buffer) in enumerate(zip(stored, buffers, strict=True)):
                self.before_group(number, group)
                if sealed is None:
                    yield LayerArrival(number, None, 0)
                    break
                body = read_header(sealed).body_offset
                layer_bytes = (len(sealed) - body) // LAYERS
                first = body + start * layer_bytes if start else 0
                buffer[first : body + end * layer_bytes] = sealed[first : body + end * layer_bytes]
                for layer in range(start, end):
                    if (number, layer) in self.damaged:
                        buffer[body + layer * layer_bytes + 77] ^= 0x10
                self.arrivals.append((number, group))
                yield LayerArrival(number, memoryview(buffer).toreadonly(), end)


def forget_device(engine: LiveEngine) -> None:
    """Empty the prefix cache, and overwrite what lies in the blocks: nothing is right because it was there before."""
    engine.clear_device()
    engine.on_engine_thread(lambda: [layer.fill_(3.0) for layer in engine.reuse.copier.layers])


def in_one_step(engine: LiveEngine, *requests: Any) -> list[Any]:
    """Let the engine admit all requests in the same step; their last outputs."""
    held, all_are_waiting = threading.Event(), threading.Event()

    def hold() -> None:
        held.set()
        all_are_waiting.wait()

    engine.thread.call(hold)
    held.wait(patience(PATIENCE_S))  # else this call would be counted among those that wait
    futures = [engine.start(request) for request in requests]
    until(lambda: engine.thread._inbox.qsize() >= len(requests), "all requests wait for the same step")
    all_are_waiting.set()
    return [future.result(patience(PATIENCE_S)) for future in futures]


def tokens_of(output: Any) -> list[int]:
    return list(output.outputs[0].token_ids)


def plain(engine: LiveEngine, tokens: list[int]) -> list[int]:
    """The answer without any KV of before; nothing of it stays."""
    port, engine.port = engine.port, MemoryPort()
    forget_device(engine)
    answer, _ = engine.ask(tokens, planned=False)
    forget_device(engine)
    engine.port = port
    return answer
