"""A backend with a real engine: AsyncLLM on the demo model in this process, behind a wire that pickles, as Ray's."""

from __future__ import annotations

import pickle
from collections.abc import AsyncIterator, Collection

from ingress_server import engine_args
from vllm.inputs import tokens_input
from vllm.outputs import RequestOutput

from deployments.engine.host import start_engine
from deployments.protocol.wire import KV_CACHE_USAGE, GenerateRequest


class EngineReplicas:
    """A `ReplicaHandle` over one engine; what the engine's prefix cache gave is the `device` of `kv_cache`."""

    def __init__(self) -> None:
        args = engine_args(num_gpu_blocks_override=128, kv_cache_memory_bytes=64 << 20, max_num_seqs=16)
        self.llm, _ = start_engine(args.create_engine_config(), log_stats=False)
        self.running: set[str] = set()
        self.aborted: list[str] = []

    async def generate(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        request = pickle.loads(pickle.dumps(request))
        prompt = tokens_input(request.prompt_token_ids, cache_salt=request.cache_salt)
        self.running.add(request.request_id)
        try:
            async for output in self.llm.generate(prompt, request.sampling_params, request.request_id):
                reused = output.num_cached_tokens or 0
                recomputed = len(request.prompt_token_ids) - reused
                output.prompt_token_ids = None
                if output.finished:
                    usage = {"device": reused, "cpu": 0, "redis": 0, "recomputed": recomputed, "replica": "0"}
                    output.kv_transfer_params = {KV_CACHE_USAGE: usage}
                yield pickle.loads(pickle.dumps(output))
        finally:
            self.running.discard(request.request_id)

    async def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        await self.llm.abort(request_id)

    def none_left(self) -> bool:
        return False

    def only_one(self) -> bool:
        return True

    def rank_of(self, replica: str) -> int | None:
        return 0

    def ranks(self) -> Collection[int]:
        return {0}
