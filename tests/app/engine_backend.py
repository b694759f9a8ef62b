"""A backend with a real engine: AsyncLLM on the demo model in this process, behind a wire that pickles, as Ray's.

The engine has a loop of its own: AsyncLLM wakes its callers on that of its first one only, and several ingresses, each
with another loop, may stand before one engine.
"""

from __future__ import annotations

import asyncio
import pickle
import threading
from collections.abc import AsyncIterator, Collection
from typing import Any

from ingress_server import engine_args
from vllm.inputs import tokens_input
from vllm.outputs import RequestOutput

from deployments.engine.host import start_engine
from deployments.protocol.wire import KV_CACHE_USAGE, GenerateRequest


class EngineSlot:
    """Keeps an `EngineReplicas` for the files that come, and starts another when need be."""

    def __init__(self, one_engine: Any) -> None:
        """`one_engine`: the fixture."""
        self._one_engine = one_engine
        self._replicas: EngineReplicas | None = None

    def get(self) -> EngineReplicas:
        """The running one; it has no request."""
        if self._replicas is None:
            self._replicas = self._one_engine.start(EngineReplicas, self._end)
        assert self._replicas is not None
        assert not self._replicas.running
        self._replicas.aborted.clear()
        return self._replicas

    def _end(self, replicas: EngineReplicas) -> None:
        self._replicas = None
        replicas.end()


class EngineReplicas:
    """A `ReplicaHandle` over one engine; what the engine's prefix cache gave is the `device` of `kv_cache`."""

    def __init__(self) -> None:
        args = engine_args(num_gpu_blocks_override=128, kv_cache_memory_bytes=64 << 20, max_num_seqs=16)
        self.llm, _ = start_engine(args.create_engine_config())
        self.running: set[str] = set()
        self.aborted: list[str] = []
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, daemon=True).start()

    def end(self) -> None:
        """End the engine."""
        self.llm.shutdown()
        self._loop.call_soon_threadsafe(self._loop.stop)

    async def generate(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        wire: asyncio.Queue[bytes | BaseException | None] = asyncio.Queue()
        loop = asyncio.get_running_loop()
        sent = pickle.dumps(request)

        async def answer() -> None:
            end: BaseException | None = None
            try:
                async for output in self._outputs(pickle.loads(sent)):
                    loop.call_soon_threadsafe(wire.put_nowait, pickle.dumps(output))
            except BaseException as error:
                end = error
            loop.call_soon_threadsafe(wire.put_nowait, end)

        self.running.add(request.request_id)
        answering = asyncio.run_coroutine_threadsafe(answer(), self._loop)
        try:
            while (received := await wire.get()) is not None:
                if isinstance(received, BaseException):
                    raise received
                yield pickle.loads(received)
        finally:
            answering.cancel()
            self.running.discard(request.request_id)

    async def _outputs(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        """On the engine's loop."""
        prompt = tokens_input(request.prompt_token_ids, cache_salt=request.cache_salt)
        async for output in self.llm.generate(prompt, request.sampling_params, request.request_id):
            reused = output.num_cached_tokens or 0
            recomputed = len(request.prompt_token_ids) - reused
            output.prompt_token_ids = None
            if output.finished:
                usage = {"device": reused, "cpu": 0, "redis": 0, "recomputed": recomputed, "replica": "0"}
                output.kv_transfer_params = {KV_CACHE_USAGE: usage}
            yield output

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(self.llm.abort(request_id), self._loop))

    def none_left(self) -> bool:
        return False

    def only_one(self) -> bool:
        return True

    def rank_of(self, replica: str) -> int | None:
        return 0

    def ranks(self) -> Collection[int]:
        return {0}
