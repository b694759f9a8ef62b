"""An engine handle whose engine is a process of its own, over a port in memory there, on a loop thread of its own."""

from __future__ import annotations

import asyncio
import ctypes
import os
import pickle
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar

import psutil
import torch
from prometheus_client import CollectorRegistry
from prometheus_client import Counter as CounterFamily
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.core import kv_cache_utils

from configs import machine
from configs.settings import load_settings
from deployments.engine.engine_args import engine_config, engine_environment
from deployments.engine.handle import EngineHandle, EnginePrompt
from deployments.engine.model_identity import model_identity
from deployments.protocol.wire import GenerateRequest
from kvmanager.moves.plan import Plan
from kvmanager.segments.keys import block_hashes, cache_salt
from load_tests.faults.inside_engine import in_engine
from load_tests.harness.engine import SECRET, greedy
from load_tests.harness.memory_port import MemoryPort
from load_tests.harness.patience import patience, until

T = TypeVar("T")

BLOCK = 32
SEGMENT_BLOCKS = 4
PATIENCE_S = 120.0
LOAD_DEADLINE_S = 2 * PATIENCE_S
"""No load is late because the machine stands still: no test of this handle wants a late one."""


class RoomPort(MemoryPort):
    """What a handle asks of a port beside the connector's part."""

    def __init__(self) -> None:
        super().__init__()
        self.counters: Counter[str] = Counter(some_degradation=1)
        registry = CollectorRegistry()
        CounterFamily("crosskv_test_waits", "One in each port.", registry=registry).inc()
        self.waits = SimpleNamespace(registry=registry)
        self.needs_resync = False
        self.registered: list[Any] = []

    def report_registration(self, arguments: Any, sent: Future[None]) -> None:
        self.registered.append(arguments)
        sent.set_result(None)

    def circuits(self) -> dict[tuple[str, str], str]:
        return {("manager", ""): "closed"}

    def flush(self) -> None:
        pass

    def look_after_tier(self) -> None:
        pass

    def close(self) -> None:
        pass


def refused_port() -> RoomPort:
    raise ValueError("no cluster here")


class LiveHandle:
    """Methods are for the test's thread."""

    def __init__(self, model: Path, open_there: Callable[[], Any] = RoomPort, **engine: Any) -> None:
        settings = load_settings(
            {
                "model": str(model),
                "dtype": "float32",
                "engine": {
                    "process": "process",
                    "device_blocks": 100,
                    "max_num_batched_tokens": 512,
                    "max_num_seqs": 16,
                    "hang_s": 60.0,
                    **engine,
                },
                "kv": {
                    "segment_tokens": SEGMENT_BLOCKS * BLOCK,
                    "load_deadline_s": LOAD_DEADLINE_S,
                    "lease_s": LOAD_DEADLINE_S,
                    # The engine's process finds the real machine's, where all tests have another one.
                    "processor": machine.processor_kind("float32"),
                },
            }
        )
        os.environ.update(engine_environment(settings))
        self.port = RoomPort()
        self.deaths: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="test-loop", daemon=True)
        self._thread.start()

        async def open_handle() -> EngineHandle:
            return EngineHandle(settings, "replica", 0, "node", lambda: self.port, self.deaths.append, open_there)  # type: ignore[arg-type,return-value]

        self.handle = self.run(open_handle())
        self.salt = cache_salt(SECRET, self.handle.fingerprint, "")
        assert not self.run(self.handle.needs_resync())  # the door is open
        self._ids = iter(range(1, 1_000_000))

    @property
    def process(self) -> psutil.Process:
        """The engine's."""
        engine: Any = self.handle._engine
        return psutil.Process(engine._processes[0].pid)

    def start(self, coroutine: Coroutine[Any, Any, T]) -> Future[T]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return self.start(coroutine).result(patience(PATIENCE_S))

    def request(self, tokens: Sequence[int], params: SamplingParams, name: str = "") -> GenerateRequest:
        hashes = block_hashes(tokens, BLOCK, self.salt)
        name = name or f"request-{next(self._ids)}"
        return GenerateRequest(name, list(tokens), params, self.salt, list(hashes))

    async def answer(self, request: GenerateRequest, plan: Plan | None = None) -> RequestOutput:
        return [output async for output in self.handle.generate(EnginePrompt(request, plan, 0.0))][-1]

    def ask(self, tokens: Sequence[int], max_tokens: int = 8, plan: Plan | None = None) -> tuple[list[int], Any]:
        """The greedy answer, and where the prompt came from."""
        output = self.run(self.answer(self.request(tokens, greedy(max_tokens)), plan))
        return list(output.outputs[0].token_ids), (output.kv_transfer_params or {})["crosskv"]

    def plan(self, tokens: Sequence[int], folder: Path) -> Plan:
        """What the port in the engine's process has for a prompt."""
        found = folder / "plan"
        in_engine(self.handle, write_plan, block_hashes(tokens, BLOCK, self.salt), str(found))
        plan: Plan = pickle.loads(found.read_bytes())
        return plan

    def count(self, name: str) -> float:
        """The sum of a counter's or gauge's samples."""
        families = self.run(self.handle.metrics())
        return sum(sample.value for family in families for sample in family.samples if sample.name == name)

    def close(self) -> None:
        self.handle.close()
        self.run(asyncio.sleep(0.01))
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(patience(PATIENCE_S))


def write_plan(core: Any, port: RoomPort, hashes: Sequence[bytes], path: str) -> None:
    Path(path).write_bytes(pickle.dumps(port.plan(hashes)))


def write_surroundings(core: Any, port: RoomPort, path: str) -> None:
    """What the engine's process calls the model and the root of all hashes, and whether it may use AMX's tiles."""
    settings = core.spec.settings
    identity = model_identity(engine_config(settings), settings).fingerprint()
    found = [identity.hex(), kv_cache_utils.NONE_HASH.hex(), str(hash("a word")), str(tiles_are_granted())]
    Path(path).write_text(" ".join(found), encoding="utf-8")


def hang_while_computing(core: Any, port: RoomPort) -> None:
    core.model_executor.execute_model = lambda *args, **kwargs: threading.Event().wait()


def tiles_are_granted() -> bool:
    """Whether Linux lets this process use AMX's tile registers, which it has to be asked for."""
    get_permissions, tile_data = 0x1022, 1 << 18
    granted = ctypes.c_uint64()
    ctypes.CDLL(None).syscall(158, get_permissions, ctypes.byref(granted))  # arch_prctl
    return torch.cpu._is_amx_tile_supported() and bool(granted.value & tile_data)


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def until_gone(process: psutil.Process) -> None:
    until(lambda: gone(process), "the engine's process ends")
