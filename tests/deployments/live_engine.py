"""`load_tests.harness.engine` for tests, on a loop thread of its own, over a port in memory: one at a time."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from vllm import SamplingParams
from vllm.outputs import RequestOutput

from configs.settings import load_settings
from deployments.engine.handle import EngineHandle
from deployments.engine.process.service import ReuseService
from deployments.protocol.engine_hints import EngineHints
from deployments.protocol.wire import KV_CACHE_USAGE
from kvmanager.index.locations import Location, Tier
from kvmanager.moves.directives import DeviceDirective, DirectiveOrder, DirectiveResult, Evict, Onboard
from kvmanager.segments.keys import cache_salt, tenant_tag
from load_tests.harness.engine import SECRET, Engine, greedy
from load_tests.harness.memory_port import MemoryPort
from load_tests.harness.patience import patience, until

T = TypeVar("T")

BLOCK = 32
SEGMENT_BLOCKS = 4
DEVICE_BLOCKS = 100
PATIENCE_S = 60.0
"""Longest wait for anything in these tests; reached only when something hangs."""
LOAD_DEADLINE_S = 2 * PATIENCE_S
"""No load is late because the machine stands still: a test that wants a late one says so."""


class LiveEngine(Engine):
    """Methods are for the test's thread; `run` takes coroutines to the engine's loop."""

    def __init__(self, model: Path, dtype: str, *, segment_tokens: int = SEGMENT_BLOCKS * BLOCK, **engine: Any) -> None:
        """`engine`: settings of that section, over those of all tests."""
        super().__init__(
            load_settings(
                {
                    "model": str(model),
                    "dtype": dtype,
                    "engine": {
                        "device_blocks": DEVICE_BLOCKS,
                        "max_num_batched_tokens": 512,
                        "max_num_seqs": 16,
                        **engine,
                    },
                    "kv": {
                        "segment_tokens": segment_tokens,
                        "load_deadline_s": LOAD_DEADLINE_S,
                        "lease_s": LOAD_DEADLINE_S,
                    },
                }
            ),
            MemoryPort(),
        )
        self.tenant = ""
        self.transfer = self.reuse.transfer
        self.reuse.layerwise.choice.mode, self.reuse.layerwise.saves = "off", False  # until a test turns it on
        self.scheduler: Any = self.thread.core.scheduler
        self._loop = asyncio.new_event_loop()
        self._loop_thread = threading.Thread(target=self._loop.run_forever, name="test-loop", daemon=True)
        self._loop_thread.start()

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.start(coroutine).result(patience(PATIENCE_S))

    def on_engine_thread(self, function: Callable[[], T]) -> T:
        return self.thread.call(function).result(patience(PATIENCE_S))

    def stream(self, tokens: Sequence[int], params: SamplingParams, planned: bool = True) -> Any:
        """vLLM's output generator for a prompt, with whatever plan the port has for it."""
        if not planned:
            return self.generate(tokens, params)
        return self.generate(tokens, params, EngineHints(self.port.plan(self.hashes(tokens)), self.tenant))

    async def answer(self, tokens: Sequence[int], params: SamplingParams, planned: bool = True) -> RequestOutput:
        """The last output, which carries all tokens."""
        return [output async for output in self.stream(tokens, params, planned)][-1]

    def ask(self, tokens: Sequence[int], max_tokens: int = 8, planned: bool = True) -> tuple[list[int], dict[str, int]]:
        """The greedy answer and the usage by tier, once all that the request saves is stored."""
        output = self.run(self.answer(tokens, greedy(max_tokens), planned))
        self.settle()
        return list(output.outputs[0].token_ids), usage(output)

    def direct(self, directive: DeviceDirective, deadline_s: float = PATIENCE_S) -> Future[DirectiveResult]:
        """Carry out one of the manager's directives; the future has its acknowledgement."""
        return self.start(self.orders.carry_out(DirectiveOrder(1, directive, deadline_s)))

    def evict(self, hashes: Sequence[bytes]) -> Future[DirectiveResult]:
        """Free a sequence's blocks."""
        keys: Any = tuple(hashes[::-1])
        return self.direct(Evict(Location(Tier.DEVICE, "replica"), keys))

    def onboard(self, tokens: Sequence[int], deadline_s: float = PATIENCE_S) -> Future[DirectiveResult]:
        """Bring what the port has of a prompt to the device, without a request."""
        hashes = self.hashes(tokens)
        plan = self.port.plan(hashes, used=False)
        return self.direct(Onboard(tuple(hashes), plan, self.tenant), deadline_s)

    def settle(self) -> None:
        """Wait until everything submitted so far is saved or dropped and all blocks are given back."""
        until(lambda: not self.on_engine_thread(self.scheduler.has_requests), "no request in the engine")
        self.wait_for_saves()
        self.on_engine_thread(lambda: None)

    @contextlib.contextmanager
    def acting_for(self, name: str) -> Iterator[None]:
        """What is asked and promoted meanwhile belongs to this tenant."""
        before = self.salt, self.tenant
        self.salt, self.tenant = cache_salt(SECRET, self.fingerprint, name), tenant_tag(SECRET, name)
        try:
            yield
        finally:
            self.salt, self.tenant = before

    @contextlib.contextmanager
    def answered_by(self, name: str | None) -> Iterator[None]:
        """What is asked meanwhile is answered by this adapter; None: by the model itself."""
        before = self.salt
        self.adapter = next((adapter for adapter in self.adapters if adapter.name == name), None)
        assert (self.adapter is None) == (name is None)
        self.salt = cache_salt(SECRET, self.fingerprint, "", adapter=self.adapter)
        try:
            yield
        finally:
            self.salt, self.adapter = before, None

    @contextlib.contextmanager
    def preempting(self, computed_tokens: int) -> Iterator[list[int]]:
        """Have the first request that has computed so much lose its blocks, and the device all others.

        The list has what it had computed, once that has happened.
        """
        core, found = self.thread.core, list[int]()
        step = core.step_fn

        def stepping() -> Any:
            running = self.scheduler.running
            if not found and running and running[0].num_computed_tokens >= computed_tokens:
                found.append(running[0].num_computed_tokens)
                self.scheduler._preempt_request(running.pop(0), time.monotonic())
                _, following = self.reuse.control.clear()
                while following:
                    _, following = self.reuse.control.clear(None, following)
            return step()

        self.on_engine_thread(lambda: setattr(core, "step_fn", stepping))
        try:
            yield found
        finally:
            self.on_engine_thread(lambda: setattr(core, "step_fn", step))

    def clear_device(self, tenant: str | None = None) -> int:
        return self.reuse.clear_device(tenant).result(patience(PATIENCE_S))

    def blocks_in_use(self) -> int:
        """Device blocks that a request or a save holds; the null block is nobody's."""
        pool = self.on_engine_thread(self.reuse.control.usage)
        return pool["blocks"] - 1 - pool["free_blocks"]

    def close(self) -> None:
        super().close()
        self.run(asyncio.sleep(0.01))  # let vLLM's cancelled tasks end
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop_thread.join(patience(PATIENCE_S))


class EngineSlot:
    """Keeps the float32 engine of a model for the tests that come, and starts another one when it has ended.

    `one_engine`: the fixture.
    """

    def __init__(self, model: Path, one_engine: Any) -> None:
        self._model = model
        self._one_engine = one_engine
        self._engine: LiveEngine | None = None

    def get(self) -> LiveEngine:
        if self._engine is None or self._engine.llm.errored:
            self._engine = self._one_engine.start(lambda: LiveEngine(self._model, "float32"), self._end)
        return self._engine

    def _end(self, engine: LiveEngine) -> None:
        self._engine = None
        engine.close()


def usage(output: RequestOutput) -> dict[str, int]:
    """Tokens of the prompt by where their KV came from."""
    counts = dict((output.kv_transfer_params or {})[KV_CACHE_USAGE])
    return {tier: counts[tier] for tier in ("device", "cpu", "redis", "recomputed")}


def handle_of(engine: LiveEngine, port: Any, replica: str, node_id: str, fingerprint: bytes) -> EngineHandle:
    """A handle on this engine."""
    handle: Any = object.__new__(EngineHandle)
    handle._llm, handle._engine, handle._service = engine.llm, engine.thread, ReuseService(engine.reuse, port)
    handle._port, handle._replica, handle._node_id, handle.fingerprint = port, replica, node_id, fingerprint
    handle._named, handle._judged, handle._begun, handle._names_requests = None, False, {}, False
    handle._terms, handle.apart = engine.reuse.terms, None
    return handle
