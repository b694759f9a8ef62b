"""What `throttle.py` measures: an engine whose stored KV lies in Redis behind a link that can be throttled.

All parts are the server's own, without HTTP and Serve: manager, Redis tier, CPU tier with one prefetch worker, and in
this process vLLM with the connector. One arm is one setting of `kv.load_or_recompute` and, for the manager, one
replica, so that no arm learns from another one's loads. The arms share the engine; one prompt at a time.
"""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray

from configs.model_folder import DEMO_MODEL, PROJECT_ROOT
from configs.settings import Settings, load_settings
from deployments.cpu_tier import get_or_start_tier
from deployments.faulty_store import StoreFaults
from deployments.kv_port import PLAN
from deployments.link_emulation import EmulatedLink
from deployments.manager_actor import KVManagerActor
from deployments.manager_client import MANAGER_ACTOR, SERVE_NAMESPACE, ManagerClient
from deployments.manager_config import manager_config
from deployments.prompt_plans import PromptPlans
from deployments.ray_port import RayPort
from deployments.redis_server import EmbeddedRedis
from deployments.redis_tier import RedisTier, RedisTierConfig
from deployments.wire import KV_CACHE_USAGE, GenerateRequest
from kvmanager.keys import block_hashes, cache_salt
from kvmanager.server_secret import ServerSecret
from load_tests.micro.prefetch_chain import MIB

APP = "throttle"
ARMS = ("load", "recompute", "auto")
PATIENCE_S = 300.0
"""Longest wait for a part; reached only when something hangs."""


@dataclass(frozen=True, slots=True)
class Served:
    """One prompt: seconds to its first token, tokens from Redis, and why."""

    ttft_s: float
    redis_tokens: int
    reason: str


def write_random_model(folder: Path) -> str:
    """A Qwen2 of 45 million random parameters with the demo model's tokenizer; 6 KiB of KV per token."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=1148, hidden_size=512, intermediate_size=2048, num_hidden_layers=12, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=8192, tie_word_embeddings=True,
    )  # fmt: skip
    model: Any = Qwen2ForCausalLM(config)
    model.to(torch.bfloat16).save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(PROJECT_ROOT / DEMO_MODEL / name, folder / name)
    return str(folder)


class ImportedManager(KVManagerActor):
    """A manager in whose process Serve is imported when it starts, as in a server, and not when a tier comes."""


class _ArmPort:
    """The port of whichever arm has its turn."""

    def __init__(self) -> None:
        self.port: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self.port, name)


class ThrottledEngine:
    """See the module's docstring. Use on one event loop, within `load_tests.micro.prefetch_chain.running`."""

    def __init__(
        self, server: EmbeddedRedis, model: str, folder: Path, device_blocks: int, dtype: str = "auto"
    ) -> None:
        settings = load_settings(
            {
                "model": model,
                "dtype": dtype,
                "engine": {"device_blocks": device_blocks, "max_num_seqs": 8},
                "kv": {"cpu_tier_bytes": 128 * MIB, "redis_bytes": 256 * MIB, "prefetch_workers": 1},
            }
        )
        from deployments.engine_args import engine_config, engine_environment

        os.environ.update(engine_environment(settings))
        from deployments.engine_host import start_engine
        from deployments.kv_reuse import KVReuse
        from deployments.model_identity import model_identity

        self.link = EmulatedLink(control_file=str(folder / "link"))
        self.link.throttle(0.0)
        self._node = ray.get_runtime_context().get_node_id()
        config = engine_config(settings)
        self._fingerprint = model_identity(config, settings).fingerprint()
        self._salt = cache_salt(ServerSecret(bytes(32)), self._fingerprint, "")
        self.block_tokens = settings.block_size_tokens
        self._start_parts(server, settings)
        self._llm, self._thread = start_engine(config, log_stats=True)
        client = ManagerClient(APP)
        self._ports = {arm: RayPort(APP, arm, self._node, settings.kv, client) for arm in ARMS}
        self._plans = {arm: PromptPlans(port, self.block_tokens) for arm, port in self._ports.items()}
        self._wait_until_ready()
        self._switch = _ArmPort()
        self._switch.port = self._ports["load"]
        self._reuse = KVReuse(self._thread, self._llm.vllm_config, settings, self._switch, self._fingerprint, "0")
        self._ids = 0

    def ask(self, method: str, *args: Any) -> Any:
        """The manager's answer."""
        return ray.get(getattr(self._manager, method).remote(*args), timeout=PATIENCE_S)

    async def store(self, tokens: Sequence[int]) -> None:
        """Compute a prompt, and wait until Redis has its KV and nobody else."""
        await self._answer("recompute", tokens)
        blocks = len(self._hashes(tokens))

        def in_redis() -> bool:
            self._keep_alive()
            return bool(self.ask("lookup", self._hashes(tokens))["redis"] >= blocks)

        await _until(in_redis, "Redis has the prompt's KV")
        await self._forget("recompute")

    async def serve(self, arm: str, tokens: Sequence[int]) -> Served:
        """One stored prompt by one arm; then the device and the CPU tier are emptied."""
        self._switch.port = self._ports[arm]
        self._keep_alive()
        served = await self._answer(arm, tokens)
        await self._forget(arm)
        return served

    def close(self) -> None:
        """End the engine and the parts."""
        self._reuse.close()
        for port in self._ports.values():
            port.close()
        self._llm.shutdown()
        for actor in (self._redis_tier, self._tier, self._manager):
            ray.kill(actor)

    def _start_parts(self, server: EmbeddedRedis, settings: Settings) -> None:
        kv = settings.kv
        name = f"SERVE_DEPLOYMENT_ACTOR::{APP}::replica::v1::{MANAGER_ACTOR}"
        options: dict[str, Any] = {"name": name, "namespace": SERVE_NAMESPACE, "num_cpus": 0}
        actor: Any = ray.remote(ImportedManager).options(**options)
        self._manager = actor.remote(manager_config(settings), with_redis=True)
        self.ask("parts")
        self._tier = get_or_start_tier(APP, self._node, int(kv.cpu_tier_bytes), kv.prefetch_workers)
        config = RedisTierConfig(
            APP, server.url, "", APP, int(kv.redis_bytes), 0, kv.redis_deadline_s, StoreFaults(link=self.link)
        )
        tier: Any = ray.remote(RedisTier).options(num_cpus=0)
        self._redis_tier = tier.remote(config, ServerSecret(bytes(32)))

    def _wait_until_ready(self) -> None:
        end = time.monotonic() + PATIENCE_S
        while True:
            self._keep_alive()
            parts = self.ask("parts")
            tier, redis = self._node in parts["cpu_tiers"], parts["redis"]
            workers = ray.get(self._tier.stats.remote(), timeout=PATIENCE_S)["workers"]
            if tier and redis["state"] == "ok" and not redis["indexing"] and workers:
                return
            if time.monotonic() > end:
                raise TimeoutError(f"not ready: CPU tier {tier}, prefetch workers {workers}, Redis {redis}")
            time.sleep(0.1)

    def _keep_alive(self) -> None:
        """A replica that is silent is forgotten, with what was measured there. Orders are left undone."""
        for rank, arm in enumerate(ARMS):
            if self.ask("take_orders", arm, 0.0) is None:
                self.ask("register_replica", arm, rank, self._node, [], self._fingerprint)
                self.ask("fix_load_or_recompute", arm, arm)

    def _hashes(self, tokens: Sequence[int]) -> list[Any]:
        return list(block_hashes(tokens, self.block_tokens, self._salt))

    async def _answer(self, arm: str, tokens: Sequence[int]) -> Served:
        """As `deployments.replica.Replica.generate`, up to the first token."""
        from vllm import SamplingParams

        self._ids += 1
        params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
        request = GenerateRequest(f"request-{self._ids}", list(tokens), params, self._salt, self._hashes(tokens))
        began = time.perf_counter()
        planned = await self._plans[arm].ask(request)
        if planned.plan is not None:
            params.extra_args = {"kv_transfer_params": {PLAN: planned.plan}}
        prompt: Any = {"type": "token", "prompt_token_ids": request.prompt_token_ids, "cache_salt": self._salt}
        ttft_s, usage = 0.0, None
        async for output in self._llm.generate(prompt, params, request.request_id):
            ttft_s = ttft_s or time.perf_counter() - began
            planned.begun()
            if output.finished:
                planned.ended(output)
                usage = (output.kv_transfer_params or {})[KV_CACHE_USAGE]
        assert usage is not None
        return Served(ttft_s, usage["redis"], usage["reason"])

    async def _forget(self, arm: str) -> None:
        """Wait until nothing is saved or on its way any more; then only Redis has KV."""
        from deployments.kv_transfer import SaveJob

        saved = threading.Event()
        self._reuse.transfer.submit_save(SaveJob([], [], saved.set))
        await asyncio.to_thread(saved.wait)
        await asyncio.wrap_future(self._reuse.clear_device())
        await asyncio.to_thread(self._ports[arm].flush)
        await _until(self._at_rest, "nothing is on its way")
        self.ask("clear", ["cpu"], PATIENCE_S)

    def _at_rest(self) -> bool:
        self._keep_alive()
        pulls = ray.get(self._tier.stats.remote(), timeout=PATIENCE_S)["pulls_in_flight"]
        stats = self.ask("stats")
        return not (pulls or stats["reservations"] or stats["leases"] or stats["demotions"])


async def _until(holds: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not await asyncio.to_thread(holds):
        if time.monotonic() > end:
            raise TimeoutError(f"waited in vain: {what}")
        await asyncio.sleep(0.01)


def prompt(seed: int, tokens: int) -> list[int]:
    """Token ids without a meaning."""
    draw = random.Random(seed)
    return [draw.randrange(10, 500) for _ in range(tokens)]
