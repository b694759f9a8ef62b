"""What `load_tests.micro.overhead` measures: an engine with KV reuse, and plain vLLM in a process of its own.

The engine is the server's own without HTTP and Serve: vLLM with the connector in this process, the KV manager and the
node's CPU tier as Ray actors, and, if wanted, the Redis tier, to which segments are copied in the background. Nothing
here computes while something else is measured: the arms take turns, and each waits until the one before is at rest.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import ray

from configs.settings import Settings, load_settings
from deployments.cpu_tier import get_or_start_tier
from deployments.kv_port import PLAN, SaveGrant
from deployments.manager_actor import KVManagerActor
from deployments.manager_client import MANAGER_ACTOR, SERVE_NAMESPACE, ManagerClient
from deployments.manager_config import manager_config
from deployments.prompt_plans import PromptPlans
from deployments.ray_port import RayPort
from deployments.redis_server import EmbeddedRedis
from deployments.redis_tier import RedisTier, RedisTierConfig
from deployments.wire import KV_CACHE_USAGE, GenerateRequest
from kvmanager.keys import block_hashes, cache_salt
from kvmanager.segments import SegmentSpan
from kvmanager.server_secret import ServerSecret
from load_tests.experiments.engine_specs import STEP_TOKENS
from load_tests.micro.prefetch_chain import MIB, until

APP = "overhead"
NAME = "replica"
PATIENCE_S = 300.0
"""Longest wait for a part; reached only when something hangs."""


@dataclass(frozen=True, slots=True)
class Timed:
    """Prompts that were sent at once: seconds until the last token, to the first token of each, and per further token
    (their means), and where the last prompt's KV came from (empty: plain vLLM)."""

    seconds: float
    ttft_s: float
    tpot_s: float
    usage: dict[str, Any]


def engine_settings(model: str, dtype: str, kv: dict[str, Any]) -> Settings:
    """The same engine for all arms."""
    engine = {"device_blocks": 512, "max_num_seqs": 16, "max_num_batched_tokens": STEP_TOKENS}
    return load_settings({"model": model, "dtype": dtype, "engine": engine, "kv": kv})


def sampling(max_tokens: int) -> Any:
    """Greedy, exactly so many tokens, each sent when it is there."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    return SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, output_kind=RequestOutputKind.DELTA)


async def timed(streams: Sequence[AsyncIterator[Any]], max_tokens: int) -> Timed:
    """Read vLLM's outputs of prompts that are sent at once."""
    began = time.perf_counter()

    async def read(stream: AsyncIterator[Any]) -> tuple[float, float, dict[str, Any]]:
        first = last = 0.0
        usage: dict[str, Any] = {}
        async for output in stream:
            last = time.perf_counter()
            first = first or last
            usage = (output.kv_transfer_params or {}).get(KV_CACHE_USAGE, usage)
        return first - began, (last - first) / max(1, max_tokens - 1), usage

    found = await asyncio.gather(*map(read, streams))
    seconds = time.perf_counter() - began
    count = len(found)
    return Timed(seconds, sum(one[0] for one in found) / count, sum(one[1] for one in found) / count, found[-1][2])


class ChosenPort:
    """A replica's port; while it does not grant, every save ends as if the manager had wanted nothing."""

    def __init__(self, port: RayPort) -> None:
        self.port = port
        self.grants = True

    def offer(self, spans: Sequence[SegmentSpan], segment_bytes: Sequence[int]) -> SaveGrant | None:
        """See `KVPort`."""
        return self.port.offer(spans, segment_bytes) if self.grants else None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.port, name)


class ReusingEngine:
    """An engine with all that a replica has. Use on one event loop, within `prefetch_chain.running`."""

    def __init__(self, server: EmbeddedRedis, model: str, dtype: str, redis: bool) -> None:
        kv: dict[str, Any] = {"cpu_tier_bytes": 128 * MIB, "redis_bytes": 256 * MIB, "load_or_recompute": "load"}
        settings = engine_settings(model, dtype, kv if redis else {**kv, "redis_url": None})
        from deployments.engine_args import engine_config, engine_environment

        os.environ.update(engine_environment(settings))
        from deployments.engine_host import start_engine
        from deployments.kv_reuse import KVReuse
        from deployments.model_identity import model_identity

        self._node = ray.get_runtime_context().get_node_id()
        config = engine_config(settings)
        self._fingerprint = model_identity(config, settings).fingerprint()
        self._salt = cache_salt(ServerSecret(bytes(32)), self._fingerprint, "")
        self._block_tokens = settings.block_size_tokens
        self._redis = redis
        self._parts = self._start_parts(server, settings)
        self._llm, self.thread = start_engine(config, log_stats=settings.engine.log_stats)
        self.port = ChosenPort(RayPort(APP, NAME, self._node, settings.kv, ManagerClient(APP)))
        self._plans = PromptPlans(self.port.port, self._block_tokens)
        self._wait_until_ready()
        switch: Any = self.port
        self.reuse = KVReuse(self.thread, self._llm.vllm_config, settings, switch, self._fingerprint, "0")
        self._ids = 0

    async def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Timed:
        """Prompts that are sent at once."""
        self._keep_alive()
        requests = []
        for tokens in prompts:  # the ingress hashes them, in another process
            self._ids += 1
            hashes: list[Any] = list(block_hashes(tokens, self._block_tokens, self._salt))
            requests.append(
                GenerateRequest(f"request-{self._ids}", list(tokens), sampling(max_tokens), self._salt, hashes)
            )
        return await timed([self._stream(request) for request in requests], max_tokens)

    async def rest(self) -> None:
        """Wait until nothing is saved, copied or on its way any more."""
        from deployments.kv_transfer import SaveJob

        saved = threading.Event()
        self.reuse.transfer.submit_save(SaveJob([], [], saved.set))
        await asyncio.to_thread(saved.wait)
        await asyncio.to_thread(self.port.flush)
        await asyncio.to_thread(until, self._at_rest, "nothing is on its way")

    async def clear_device(self) -> None:
        """The device forgets all, and the manager hears of it."""
        await self.rest()
        await asyncio.wrap_future(self.reuse.clear_device())
        await asyncio.to_thread(self.port.flush)

    async def clear(self) -> None:
        """Everything is forgotten."""
        await self.clear_device()
        self._ask("clear", ["cpu", "redis"] if self._redis else ["cpu"], PATIENCE_S)

    @property
    def segments_saved(self) -> int:
        """Since the start."""
        return self.reuse.transfer.counters.segments_saved

    def close(self) -> None:
        """End the engine and the parts."""
        self.reuse.close()
        self.port.close()
        self._llm.shutdown()
        for actor in self._parts:
            ray.kill(actor)

    def _start_parts(self, server: EmbeddedRedis, settings: Settings) -> list[Any]:
        kv = settings.kv
        name = f"SERVE_DEPLOYMENT_ACTOR::{APP}::replica::v1::{MANAGER_ACTOR}"
        options: dict[str, Any] = {"name": name, "namespace": SERVE_NAMESPACE, "num_cpus": 0}
        actor: Any = ray.remote(KVManagerActor).options(**options)
        self._manager = actor.remote(manager_config(settings), with_redis=self._redis)
        self._ask("parts")
        workers = kv.prefetch_workers if self._redis else 0
        self._tier = get_or_start_tier(APP, self._node, int(kv.cpu_tier_bytes), workers)
        if not self._redis:
            return [self._tier, self._manager]
        config = RedisTierConfig(APP, server.url, "", APP, int(kv.redis_bytes), 0, kv.redis_deadline_s)
        tier: Any = ray.remote(RedisTier).options(num_cpus=0)
        return [tier.remote(config, ServerSecret(bytes(32))), self._tier, self._manager]

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + PATIENCE_S
        while True:
            self._keep_alive()
            parts = self._ask("parts")
            there = self._node in parts["cpu_tiers"]
            if self._redis:
                redis = parts["redis"]
                workers = ray.get(self._tier.stats.remote(), timeout=PATIENCE_S)["workers"]
                there = there and redis["state"] == "ok" and not redis["indexing"] and bool(workers)
            if there:
                return
            if time.monotonic() > end:
                raise TimeoutError(f"not ready: {parts}")
            time.sleep(0.1)

    def _ask(self, method: str, *args: Any) -> Any:
        return ray.get(getattr(self._manager, method).remote(*args), timeout=PATIENCE_S)

    def _keep_alive(self) -> None:
        """A replica that is silent is forgotten."""
        if self._ask("take_orders", NAME, 0.0) is None:
            self._ask("register_replica", NAME, 0, self._node, [], self._fingerprint)

    def _at_rest(self) -> bool:
        self._keep_alive()
        pulls = ray.get(self._tier.stats.remote(), timeout=PATIENCE_S)["pulls_in_flight"]
        stats = self._ask("stats")
        return not (pulls or stats["reservations"] or stats["leases"] or stats["demotions"])

    async def _stream(self, request: GenerateRequest) -> AsyncIterator[Any]:
        """As `deployments.replica.Replica.generate`."""
        planned = await self._plans.ask(request)
        params = request.sampling_params
        if planned.plan is not None:
            params.extra_args = {"kv_transfer_params": {PLAN: planned.plan}}
        prompt: Any = {"type": "token", "prompt_token_ids": request.prompt_token_ids, "cache_salt": self._salt}
        async for output in self._llm.generate(prompt, params, request.request_id):
            planned.begun()
            if output.finished:
                planned.ended(output)
            yield output


class PlainVLLM:
    """The same engine with `kv.enabled: false`, in a process that does nothing until it is asked."""

    def __init__(self, model: str, dtype: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(model, dtype, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._hear()

    async def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> Timed:
        """Prompts that are sent at once."""
        self._pipe.send(([list(tokens) for tokens in prompts], max_tokens))
        found: Timed = await asyncio.to_thread(self._hear)
        return found

    def close(self) -> None:
        """End the process."""
        self._pipe.send(None)
        self._process.join(10.0)
        if self._process.is_alive():
            self._process.kill()

    def _hear(self) -> Any:
        if not self._pipe.poll(PATIENCE_S):
            raise TimeoutError("plain vLLM does not answer")
        return self._pipe.recv()


def _serve(model: str, dtype: str, pipe: Any) -> None:
    """The process of plain vLLM."""
    os.dup2(2, 1)  # what vLLM prints is no result
    settings = engine_settings(model, dtype, {"enabled": False})
    from deployments.engine_args import engine_config, engine_environment

    os.environ.update(engine_environment(settings))
    from deployments.engine_host import start_engine

    llm, _ = start_engine(engine_config(settings), log_stats=settings.engine.log_stats)

    async def answer() -> None:
        number = 0
        pipe.send("ready")
        while (job := await asyncio.to_thread(pipe.recv)) is not None:
            prompts, max_tokens = job
            streams: list[AsyncIterator[Any]] = []
            for tokens in prompts:
                number += 1
                prompt: Any = {"type": "token", "prompt_token_ids": tokens}
                streams.append(llm.generate(prompt, sampling(max_tokens), f"request-{number}"))
            pipe.send(await timed(streams, max_tokens))

    asyncio.run(answer())
    llm.shutdown()


Layerwise = Literal["auto", "off"]
Arm = Callable[[], Coroutine[Any, Any, float]]
