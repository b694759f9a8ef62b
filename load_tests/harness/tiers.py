"""A manager, a node's CPU tier and the Redis tier as Ray actors, with a Ray and a redis-server of the program's own."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import ray

from app.launch.ray_start import agents_given_ports
from configs.model_folder import PROJECT_ROOT
from configs.settings import Settings
from deployments.cpu_tier.actor import get_or_start_tier
from deployments.manager.actor import KVManagerActor
from deployments.manager.tier_registry import OK
from deployments.protocol.engine_facts import EngineFacts
from deployments.protocol.manager_client import MANAGER_ACTOR, SERVE_NAMESPACE
from deployments.redis_tier.actor import RedisTier, RedisTierConfig
from deployments.redis_tier.server import EmbeddedRedis
from deployments.segment_store.segment_codecs import Coding
from kvmanager.config import ManagerConfig
from load_tests.harness.engine import SECRET
from load_tests.harness.patience import PATIENCE_S, until

MIB = 1 << 20


@contextmanager
def own_ray() -> Iterator[None]:
    """A Ray of this program's own, whose workers can import the project."""
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    with agents_given_ports():
        ray.init(
            address="local", namespace=SERVE_NAMESPACE, include_dashboard=False, num_cpus=8, log_to_driver=False,
            object_store_memory=512 * MIB, _system_config={"automatic_object_spilling_enabled": False},
            runtime_env={"env_vars": {"PYTHONPATH": str(PROJECT_ROOT)}},
        )  # fmt: skip
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def own_redis(most_bytes: int) -> Iterator[EmbeddedRedis]:
    """A redis-server, and its end."""
    with tempfile.TemporaryDirectory(prefix="crosskv-") as folder:
        server = EmbeddedRedis(Path(folder), most_bytes)
        server.start()
        try:
            yield server
        finally:
            server.stop()


@contextmanager
def running() -> Iterator[EmbeddedRedis]:
    """Both."""
    with own_ray(), own_redis(512 * MIB) as server:
        yield server


class ImportedManager(KVManagerActor):
    """A manager in whose process Serve is imported when it starts, as in a server, and not when a tier comes."""


def start_manager(
    app: str, config: ManagerConfig, with_redis: bool = False, actor_class: type[KVManagerActor] = ImportedManager
) -> Any:
    """A manager, named as Serve names it."""
    name = f"SERVE_DEPLOYMENT_ACTOR::{app}::replica::v1::{MANAGER_ACTOR}"
    options: dict[str, Any] = {"name": name, "namespace": SERVE_NAMESPACE, "num_cpus": 0}
    return ray.remote(actor_class).options(**options).remote(config, with_redis=with_redis)


def redis_config(app: str, server: EmbeddedRedis, settings: Settings) -> RedisTierConfig:
    """Of a Redis tier over that server; nothing expires."""
    kv = settings.kv
    return RedisTierConfig(app, server.url, "", app, int(kv.redis_bytes), 0, kv.redis_deadline_s)


class Tiers:
    """The parts of one application on this node. Within `own_ray`."""

    def __init__(
        self,
        app: str,
        config: ManagerConfig,
        cpu_bytes: int,
        workers: int = 0,
        redis: RedisTierConfig | None = None,
    ) -> None:
        """Without `redis` there is no Redis tier."""
        self.node: str = ray.get_runtime_context().get_node_id()
        self._redis_config = redis
        self.manager = start_manager(app, config, redis is not None)
        self.ask("api", "parts")
        self.tier = get_or_start_tier(app, self.node, cpu_bytes, workers)
        self.redis: Any = self._start_redis(redis) if redis else None

    def ask(self, method: str, *args: Any) -> Any:
        """The manager's answer."""
        return ray.get(getattr(self.manager, method).remote(*args), timeout=PATIENCE_S)

    def ask_tier(self, method: str, *args: Any) -> Any:
        """The CPU tier's answer."""
        return ray.get(getattr(self.tier, method).remote(*args), timeout=PATIENCE_S)

    def keep_alive(self, fingerprint: bytes, *replicas: str) -> list[str]:
        """Register those replicas that the manager does not know, or has forgotten for their silence; which they were.

        Orders are left undone.
        """
        unknown = [name for name in replicas if self.ask("take_directives", name, 0.0) is None]
        for name in unknown:
            self.ask("register_replica", name, replicas.index(name), self.node, [], EngineFacts(fingerprint))
        return unknown

    def wait_until_ready(self, keep_alive: Callable[[], object]) -> None:
        """Until the tiers are registered, Redis is read, and the prefetch workers have started."""

        def ready() -> bool:
            keep_alive()
            parts = self.ask("api", "parts")
            if self.node not in parts["cpu_tiers"]:
                return False
            redis = parts["redis"]
            return self.redis is None or bool(
                redis["state"] == OK and not redis["indexing"] and self.ask_tier("stats")["workers"]
            )

        until(ready, "the tiers are ready", PATIENCE_S)

    def at_rest(self) -> bool:
        """Whether nothing is copied, held or on its way."""
        stats = self.ask("api", "stats")
        return not (
            self.ask_tier("stats")["pulls_in_flight"] or stats["reservations"] or stats["leases"] or stats["demotions"]
        )

    def stored_bytes(self) -> dict[str, int]:
        """What each shared tier holds, by the manager's books."""
        held = {"cpu": 0, "redis": 0}
        for place in self.ask("api", "stats")["locations"]:
            held[place["tier"]] += place["bytes"]
        return held

    def restart_redis(self, coding: Coding) -> None:
        """From now on what Redis stores is coded so."""
        assert self._redis_config is not None
        ray.get(self.redis.close.remote(), timeout=PATIENCE_S)
        ray.kill(self.redis)
        self.redis = self._start_redis(replace(self._redis_config, coding=coding))
        until(lambda: ray.get(self.redis.stats.remote(), timeout=PATIENCE_S)["state"] == OK, "Redis is ready again")
        until(self._workers_know_redis, "the CPU tier's workers store so")

    def close(self) -> None:
        """End all of them."""
        for actor in filter(None, (self.redis, self.tier, self.manager)):
            ray.kill(actor)

    def _workers_know_redis(self) -> bool:
        """Whether the prefetch workers that are there were started for the Redis that the manager knows."""
        tier: Any = self.tier
        told = ray.get(self.manager.__ray_call__.remote(lambda manager: manager._tiers.redis_endpoint))
        used = ray.get(tier.__ray_call__.remote(lambda tier: (tier._redis._endpoint, tier._redis.settled)))
        return bool(used == (told, True))

    def _start_redis(self, config: RedisTierConfig) -> Any:
        redis_tier: Any = ray.remote(RedisTier).options(num_cpus=0)
        return redis_tier.remote(config, SECRET)
