"""A real vLLM engine for tests: one at a time in this process, on a loop thread of its own, over a port in memory."""

from __future__ import annotations

import asyncio
import contextlib
import random
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, TypeVar

from memory_port import MemoryPort
from vllm import SamplingParams
from vllm.outputs import RequestOutput

from configs.settings import load_settings
from deployments.device_orders import DeviceOrders
from deployments.engine_args import engine_config
from deployments.engine_host import start_engine
from deployments.kv_port import PLAN, TENANT
from deployments.kv_reuse import KVReuse
from deployments.kv_transfer import SaveJob
from deployments.model_identity import model_identity
from deployments.wire import KV_CACHE_USAGE
from kvmanager.keys import block_hashes, cache_salt, tenant_tag
from kvmanager.server_secret import ServerSecret

T = TypeVar("T")

BLOCK = 32
SECRET = ServerSecret(bytes(32))
SEGMENT_BLOCKS = 4
DEVICE_BLOCKS = 100
PATIENCE_S = 60.0
"""Longest wait for anything in these tests; reached only when something hangs."""


def prompt(seed: int, length: int) -> list[int]:
    """`length` token ids without a meaning; equal seeds give equal beginnings."""
    draw = random.Random(seed)
    return [draw.randrange(10, 500) for _ in range(length)]


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, **options)


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait for `holds()`; fails after `PATIENCE_S`."""
    deadline = time.monotonic() + PATIENCE_S
    while not holds():
        assert time.monotonic() < deadline, f"waited in vain for: {what}"
        time.sleep(0.005)


class PortSwitch:
    """A `KVPort` that passes everything to `port`, which a test may replace."""

    def __init__(self, port: MemoryPort) -> None:
        self.port = port

    def __getattr__(self, name: str) -> Any:
        return getattr(self.port, name)


class LiveEngine:
    """An engine with KV reuse. Methods are for the test's thread; `run` takes coroutines to the engine's loop."""

    def __init__(self, model: Path, dtype: str) -> None:
        settings = load_settings(
            {
                "model": str(model),
                "dtype": dtype,
                "engine": {
                    "device_blocks": DEVICE_BLOCKS,
                    "max_num_batched_tokens": 512,
                    "max_num_seqs": 16,
                    "log_stats": False,
                },
                "kv": {"segment_tokens": SEGMENT_BLOCKS * BLOCK, "layerwise": {"enabled": "off"}},
            }
        )
        self.llm, self.thread = start_engine(engine_config(settings), log_stats=False)
        self.fingerprint = model_identity(self.llm.vllm_config, settings).fingerprint()
        self.salt = cache_salt(SECRET, self.fingerprint, "")
        self.tenant = ""
        self._switch = PortSwitch(MemoryPort())
        self.reuse = KVReuse(self.thread, self.llm.vllm_config, settings, self._switch, self.fingerprint, "0")
        self.transfer = self.reuse.transfer
        self.orders = DeviceOrders(self.reuse.control, self.thread.call)
        self.scheduler: Any = self.thread.core.scheduler
        self._ids = 0
        self._loop = asyncio.new_event_loop()
        self._loop_thread = threading.Thread(target=self._loop.run_forever, name="test-loop", daemon=True)
        self._loop_thread.start()

    @property
    def port(self) -> Any:
        """What the connector stores into and loads from."""
        return self._switch.port

    @port.setter
    def port(self, port: MemoryPort) -> None:
        self._switch.port = port

    def hashes(self, tokens: Sequence[int]) -> list[bytes]:
        return block_hashes(tokens, BLOCK, self.salt)

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.start(coroutine).result(PATIENCE_S)

    def on_engine_thread(self, function: Callable[[], T]) -> T:
        return self.thread.call(function).result(PATIENCE_S)

    def stream(self, tokens: Sequence[int], params: SamplingParams, planned: bool = True) -> Any:
        """vLLM's output generator for a prompt, with whatever plan the port has for it."""
        self._ids += 1
        if planned:
            plan = {PLAN: self.port.plan(self.hashes(tokens)), **({TENANT: self.tenant} if self.tenant else {})}
            params.extra_args = {"kv_transfer_params": plan}
        request = {"type": "token", "prompt_token_ids": list(tokens), "cache_salt": self.salt}
        return self.llm.generate(request, params, f"request-{self._ids}")

    async def answer(self, tokens: Sequence[int], params: SamplingParams, planned: bool = True) -> RequestOutput:
        """The last output, which carries all tokens."""
        return [output async for output in self.stream(tokens, params, planned)][-1]

    def ask(self, tokens: Sequence[int], max_tokens: int = 8, planned: bool = True) -> tuple[list[int], dict[str, int]]:
        """The greedy answer and the usage by tier, once all that the request saves is stored."""
        output = self.run(self.answer(tokens, greedy(max_tokens), planned))
        self.settle()
        return list(output.outputs[0].token_ids), usage(output)

    def direct(self, kind: str, deadline_s: float = PATIENCE_S, **order: Any) -> Future[dict[str, Any]]:
        """Carry out one of the manager's directives; the future has its acknowledgement."""
        return self.start(self.orders.carry_out({"kind": kind, "deadline_s": deadline_s, **order}))

    def promote(self, tokens: Sequence[int], deadline_s: float = PATIENCE_S) -> Future[dict[str, Any]]:
        """Bring what the port has of a prompt to the device, without a request."""
        hashes = self.hashes(tokens)
        plan = self.port.plan(hashes, used=False)
        named = {name: plan[name] for name in ("segments", "scores", "now", "epoch")}
        return self.direct("promote", deadline_s, hashes=hashes, tenant=self.tenant, **named)

    def settle(self) -> None:
        """Wait until everything submitted so far is saved or dropped and all blocks are given back."""
        until(lambda: not self.on_engine_thread(self.scheduler.has_requests), "no request in the engine")
        saved = threading.Event()
        self.transfer.submit_save(SaveJob([], [], saved.set))
        assert saved.wait(PATIENCE_S)
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

    def clear_device(self, tenant: str | None = None) -> int:
        return self.reuse.clear_device(tenant).result(PATIENCE_S)

    def blocks_in_use(self) -> int:
        """Device blocks that a request or a save holds; the null block is nobody's."""
        pool = self.reuse.pool_usage().result(PATIENCE_S)
        return pool["blocks"] - 1 - pool["free_blocks"]

    def close(self) -> None:
        self.reuse.close()
        self.llm.shutdown()
        self.run(asyncio.sleep(0.01))  # let vLLM's cancelled tasks end
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._loop_thread.join(PATIENCE_S)


class EngineSlot:
    """Keeps one engine, because vLLM's globals allow one connector in a process, and starts another when need be."""

    def __init__(self, model: Path) -> None:
        self._model = model
        self._dtype = ""
        self._engine: LiveEngine | None = None

    def get(self, dtype: str) -> LiveEngine:
        if self._engine is None or self._dtype != dtype or self._engine.llm.errored:
            self.close()
            self._engine, self._dtype = LiveEngine(self._model, dtype), dtype
        return self._engine

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None


def usage(output: RequestOutput) -> dict[str, int]:
    """Tokens of the prompt by where their KV came from."""
    counts = dict((output.kv_transfer_params or {})[KV_CACHE_USAGE])
    counts.pop("replica")
    return counts
