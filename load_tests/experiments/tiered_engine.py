"""An engine with KV reuse, a CPU tier and Redis in this process and below it, and what moving a prompt's KV takes."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import ray

from configs.settings import Settings
from deployments.cpu_tier import HEARTBEAT_S, get_or_start_tier
from deployments.kv_port import FIDELITY, PLAN, SaveGrant
from deployments.manager_actor import KVManagerActor
from deployments.manager_client import MANAGER_ACTOR, SERVE_NAMESPACE
from deployments.manager_config import manager_config
from deployments.redis_server import EmbeddedRedis
from deployments.redis_tier import RedisTier, RedisTierConfig
from deployments.segment_codecs import CACHEGEN, LOSSLESS, RAW_CODING, Coding
from deployments.tier_seats import OK
from deployments.wire import GenerateRequest
from kvmanager.keys import EXACT, TOLERANT, Fidelity, block_hashes, cache_salt
from kvmanager.segment_format import RAW
from kvmanager.segments import SegmentSpan
from kvmanager.server_secret import ServerSecret
from load_tests.micro.overhead_arms import APP, PATIENCE_S, ReusingEngine, Timed
from load_tests.micro.prefetch_chain import running, until
from load_tests.micro.throttled_engine import prompt

WARM_UP_TOKENS = 512
POLL_S = 0.002
CODECS: dict[str, tuple[Coding, Fidelity]] = {
    RAW: (RAW_CODING, EXACT),
    LOSSLESS: (Coding(LOSSLESS, RAW), EXACT),
    "int8": (Coding(RAW, "int8"), TOLERANT),
    CACHEGEN: (Coding(RAW, CACHEGEN, 2), TOLERANT),
}
"""How Redis stores, and the fidelity of the prompts that it stores so: `kv.redis_codec`, `kv.tolerant_codec`."""
SEEDS = itertools.count(1)


class HeldPort:
    """A replica's port whose saves wait for `begin`: so a whole prompt's way out can be timed by itself."""

    def __init__(self, port: Any) -> None:
        self.begin = threading.Event()
        self.begin.set()
        self._port = port

    def offer(self, spans: Sequence[SegmentSpan], segment_bytes: Sequence[int]) -> SaveGrant | None:
        """See `KVPort`."""
        self.begin.wait(PATIENCE_S)
        granted: SaveGrant | None = self._port.offer(spans, segment_bytes)
        return granted

    def __getattr__(self, name: str) -> Any:
        return getattr(self._port, name)


class CodedEngine(ReusingEngine):
    """A `ReusingEngine` whose Redis tier stores with the codec, and whose prompts have the fidelity, that is chosen."""

    def __init__(self, server: EmbeddedRedis, model: str, dtype: str) -> None:
        self._coding = RAW_CODING
        self._fidelity: Fidelity = EXACT
        super().__init__(server, model, dtype, redis=True)
        held: Any = HeldPort(self.port.port)
        self.held: HeldPort = held
        self.port.port = held

    async def choose(self, codec: str) -> None:
        """Forget everything; from now on Redis stores with `codec` (of `CODECS`), and prompts have its fidelity."""
        coding, self._fidelity = CODECS[codec]
        self._salt = cache_salt(ServerSecret(bytes(32)), self._fingerprint, "", self._fidelity)
        await self.clear()
        if coding == self._coding:
            return
        self._coding = coding
        await asyncio.to_thread(self._restart_redis_tier)
        end = time.monotonic() + PATIENCE_S
        while not await self._stores_with(codec):
            if time.monotonic() > end:
                raise TimeoutError(f"Redis does not store with {codec}")

    async def swap_out(self, tokens: Sequence[int], max_tokens: int = 1) -> tuple[Timed, dict[str, float]]:
        """Compute a prompt, and only then save it; seconds from there until each tier has all of it."""
        hashes = list(block_hashes(tokens, self._block_tokens, self._salt))
        self.held.begin.clear()
        try:
            found = await self.run([tokens], max_tokens)
        finally:
            began = time.perf_counter()
            self.held.begin.set()
        taken = {}
        for tier in ("cpu", "redis"):
            await self._until_stored(tier, hashes)
            taken[tier] = time.perf_counter() - began
        await self.rest()
        return found, taken

    async def drop(self, *tiers: str) -> None:
        """The device and these tiers forget all."""
        await self.clear_device()
        if tiers:
            self._ask("clear", list(tiers), PATIENCE_S)

    def stored_bytes(self) -> dict[str, int]:
        """What each shared tier holds, by the manager's books."""
        held = {"cpu": 0, "redis": 0}
        for place in self._ask("stats")["locations"]:
            held[place["tier"]] += place["bytes"]
        return held

    async def _until_stored(self, tier: str, hashes: Sequence[bytes]) -> None:
        end = time.monotonic() + PATIENCE_S
        while (await asyncio.to_thread(self._ask, "lookup", hashes))[tier] < len(hashes):
            if time.monotonic() > end:
                raise TimeoutError(f"the {tier} tier did not get the prompt's KV")
            self._keep_alive()
            await asyncio.sleep(POLL_S)

    def _start_parts(self, server: EmbeddedRedis, settings: Settings) -> list[Any]:
        kv = settings.kv
        name = f"SERVE_DEPLOYMENT_ACTOR::{APP}::replica::v1::{MANAGER_ACTOR}"
        options: dict[str, Any] = {"name": name, "namespace": SERVE_NAMESPACE, "num_cpus": 0}
        actor: Any = ray.remote(KVManagerActor).options(**options)
        self._manager = actor.remote(manager_config(settings), with_redis=True)
        self._ask("parts")
        self._tier = get_or_start_tier(APP, self._node, int(kv.cpu_tier_bytes), kv.prefetch_workers)
        self._redis_config = RedisTierConfig(APP, server.url, "", APP, int(kv.redis_bytes), 0, kv.redis_deadline_s)
        return [self._redis_tier(), self._tier, self._manager]

    def _redis_tier(self) -> Any:
        tier: Any = ray.remote(RedisTier).options(num_cpus=0)
        return tier.remote(replace(self._redis_config, coding=self._coding), ServerSecret(bytes(32)))

    def _restart_redis_tier(self) -> None:
        ray.get(self._parts[0].close.remote(), timeout=PATIENCE_S)
        ray.kill(self._parts[0])
        self._parts[0] = self._redis_tier()
        until(lambda: ray.get(self._parts[0].stats.remote(), timeout=PATIENCE_S)["state"] == OK, "Redis is ready again")
        time.sleep(3 * HEARTBEAT_S)  # with the next one the CPU tier starts workers that store so
        self._wait_until_ready()

    async def _stores_with(self, codec: str) -> bool:
        """Whether a new prompt's KV lies in Redis in that codec; forgets everything."""
        await self.swap_out(prompt(next(SEEDS), WARM_UP_TOKENS))
        stored = self.stored_bytes()
        known = ray.get(self._tier.stats.remote(), timeout=PATIENCE_S)["codecs"]
        await self.clear()
        if codec == RAW:
            return stored["redis"] == stored["cpu"]
        return codec in known and stored["redis"] < stored["cpu"]

    async def _stream(self, request: GenerateRequest) -> AsyncIterator[Any]:
        """As `deployments.replica.Replica.generate`."""
        planned = await self._plans.ask(request)
        params = request.sampling_params
        transfer: dict[str, Any] = {PLAN: planned.plan} if planned.plan is not None else {}
        if self._fidelity != EXACT:
            transfer[FIDELITY] = self._fidelity
        params.extra_args = {"kv_transfer_params": transfer}
        prompt_tokens: Any = {"type": "token", "prompt_token_ids": request.prompt_token_ids, "cache_salt": self._salt}
        async for output in self._llm.generate(prompt_tokens, params, request.request_id):
            planned.begun()
            if output.finished:
                planned.ended(output)
            yield output


class TieredHost:
    """The host of a `TieredSpec`. Its methods are called one after the other; each prompt is a new one."""

    def __init__(self, engine: CodedEngine) -> None:
        self._engine = engine
        self._runner = asyncio.Runner()
        self.round(WARM_UP_TOKENS, 2)

    def round(self, tokens: int, max_tokens: int, codec: str = RAW) -> dict[str, Any]:
        """One prompt: computed with nothing to reuse, moved out, and answered again from each tier.

        By `none`, `device`, `cpu` and `redis`: `ttft_s`, `seconds` until the last token, and the tokens that were
        `reused`; `out`: seconds until the CPU tier and Redis had it; `bytes`: what it takes there.
        """
        return self._runner.run(self._round(prompt(next(SEEDS), tokens), max_tokens, codec))

    def fill(self, prompts: int, tokens: int) -> dict[str, int]:
        """Serve prompts, one after the other; returns the bytes in the shared tiers once all is stored."""
        return self._runner.run(self._fill(prompts, tokens))

    def _counted(self, found: Timed) -> dict[str, float]:
        usage = found.usage
        reused = usage["device"] + usage["cpu"] + usage["redis"]
        return {"ttft_s": found.ttft_s, "seconds": found.seconds, "reused": reused}

    async def _round(self, tokens: list[int], max_tokens: int, codec: str) -> dict[str, Any]:
        engine = self._engine
        await engine.choose(codec)
        computed, out = await engine.swap_out(tokens, max_tokens)
        found: dict[str, Any] = {"none": self._counted(computed), "out": out, "bytes": engine.stored_bytes()}
        engine.port.grants = False  # what is measured now is reading
        for source, dropped in (("device", None), ("cpu", ()), ("redis", ("cpu",))):
            if dropped is not None:
                await engine.drop(*dropped)
            found[source] = self._counted(await engine.run([tokens], max_tokens))
            await engine.rest()
        engine.port.grants = True
        return found

    async def _fill(self, prompts: int, tokens: int) -> dict[str, int]:
        await self._engine.choose(RAW)
        for _ in range(prompts):
            await self._engine.swap_out(prompt(next(SEEDS), tokens))
        return self._engine.stored_bytes()


@contextlib.contextmanager
def tiered_engine(folder: str, dtype: str) -> Iterator[TieredHost]:
    """The engine with all its parts, and their end."""
    with running() as server:
        engine = CodedEngine(server, folder, dtype)
        try:
            yield TieredHost(engine)
        finally:
            engine.close()
