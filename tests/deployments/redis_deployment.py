"""An application's Redis tier under a manager that records what it is told: in this process, or in a real Ray."""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from redis_fixture import FINGERPRINT, MIB, PATIENCE_S, SECRET, until

from deployments.protocol.manager_client import MANAGER_ACTOR, SERVE_NAMESPACE
from deployments.redis_tier import actor as redis_tier
from deployments.redis_tier.actor import RedisTier, RedisTierConfig, RedisTimes
from kvmanager.segments.spans import SegmentSpan
from load_tests.harness.patience import patience

TIMES = RedisTimes(heartbeat_s=0.02, first_heartbeat_s=0.02, probe_every_s=0.02, retry_s=0.02, longest_retry_s=0.1)
_numbers = itertools.count()


class Manager:
    """Keeps every segment whose parent it keeps, up to `room` of them. A life is known once it is registered."""

    def __init__(self, fingerprint: bytes | None, room: int) -> None:
        self.fingerprint = fingerprint
        self.room = room
        self.life = ""
        self.state = ""
        self.states: set[str] = set()
        self.endpoint: Any = None
        self.handle: Any = None
        self.budget = 0
        self.kept: dict[bytes, SegmentSpan] = {}
        self.sizes: dict[bytes, int] = {}
        self.indexed = False
        self.told: list[str] = []

    async def redis_alive(self, incarnation: str, state: str) -> dict[str, Any]:
        self.state = state
        self.states.add(state)
        return {"known": incarnation == self.life, "fingerprint": self.fingerprint}

    async def register_redis(self, handle: Any, incarnation: str, endpoint: Any, budget_bytes: int) -> None:
        self.told.append("registered")
        self.handle, self.life, self.endpoint, self.budget = handle, incarnation, endpoint, budget_bytes
        self.kept, self.indexed = {}, False

    async def adopt_redis(
        self,
        incarnation: str,
        spans: Sequence[SegmentSpan],
        sizes: Sequence[int],
        raw_sizes: Sequence[int],
        forms: Mapping[bytes, bytes],
    ) -> list[bytes]:
        assert incarnation == self.life
        assert set(raw_sizes) == {16_832}  # head, table and layers
        self.sizes |= {span.key: size for span, size in zip(spans, sizes, strict=True)}
        for span in spans:
            if len(self.kept) < self.room and (span.parent is None or span.parent in self.kept):
                self.kept[span.key] = span
        return [span.key for span in spans if span.key in self.kept]

    async def redis_indexed(self, incarnation: str) -> None:
        assert incarnation == self.life
        self.told.append("indexed")
        self.indexed = True

    async def redis_lost(self, incarnation: str, state: str) -> None:
        self.told.append(f"lost: {state}")
        self.life, self.kept, self.indexed = "", {}, False

    async def set_fingerprint(self, fingerprint: bytes) -> None:
        self.fingerprint = fingerprint

    async def report(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "handle"}

    async def evict(self, keys: Sequence[bytes]) -> int:
        """As the real one orders it: by the handle that it was given."""
        evict = self.handle.evict
        return int(await (evict.remote(keys) if hasattr(evict, "remote") else evict(keys)))


class Deployment:
    """A manager and a Redis tier of one application, in this process, on an event loop of their own."""

    def __init__(self, **config: Any) -> None:
        self.app = f"redis{next(_numbers)}"
        self.room = config.pop("room", 10**6)
        self.times = config.pop("times", TIMES)
        fingerprint = config.pop("fingerprint", FINGERPRINT)
        self.config = RedisTierConfig(
            **{
                "app_name": self.app, "url": "embedded", "folder": "/nonexistent", "namespace": "tests",
                "budget_bytes": 64 * MIB, "expire_s": 0, "deadline_s": 30.0, **config,
            }
        )  # fmt: skip
        self.start_manager(fingerprint)
        self.start_tier()

    def start_manager(self, fingerprint: bytes | None) -> None:
        self.manager = Manager(fingerprint, self.room)

    def start_tier(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=self.loop.run_forever)
        self.thread.start()

        async def start() -> RedisTier:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(redis_tier, "ManagerClient", lambda app_name: SimpleNamespace(ask=self.ask_manager))
                tier = RedisTier(self.config, SECRET, self.times)
            tier._address = lambda: tier  # type: ignore[method-assign]
            return tier

        self.tier = self.wait_for(start())

    async def ask_manager(self, method: str, *args: Any, timeout_s: float) -> Any:
        """What `ManagerClient.ask` does."""
        return await getattr(self.manager, method)(*args)

    def wait_for(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(patience(PATIENCE_S))

    def ask(self, method: str, *args: Any) -> Any:
        return self.wait_for(getattr(self.manager, method)(*args))

    def ask_tier(self, method: str, *args: Any) -> Any:
        return self.wait_for(getattr(self.tier, method)(*args))

    def report(self) -> dict[str, Any]:
        return self.ask("report")  # type: ignore[no-any-return]

    def until_ok(self, after: int = 0) -> dict[str, Any]:
        """The manager's report once Redis is indexed and it has been told so more than `after` times."""
        until(lambda: self.report()["told"].count("indexed") > after, "Redis is indexed")
        until(lambda: self.report()["state"] == "ok", "Redis is ok")
        return self.report()

    def close(self) -> None:
        try:
            self.ask_tier("close")
        finally:
            self.loop.call_soon_threadsafe(self.loop.stop)
            self.thread.join()
            self.loop.close()


class RayDeployment(Deployment):
    """The same, of actors."""

    def start_manager(self, fingerprint: bytes | None) -> None:
        name = f"SERVE_DEPLOYMENT_ACTOR::{self.app}::replica::v1::{MANAGER_ACTOR}"
        options = {"name": name, "namespace": SERVE_NAMESPACE, "num_cpus": 0}
        self.manager = ray.remote(Manager).options(**options).remote(fingerprint, self.room)
        self.report()

    def start_tier(self) -> None:
        self.tier = ray.remote(num_cpus=0, max_restarts=-1)(RedisTier).remote(self.config, SECRET, self.times)

    def ask(self, method: str, *args: Any) -> Any:
        return ray.get(getattr(self.manager, method).remote(*args), timeout=patience(PATIENCE_S))

    def ask_tier(self, method: str, *args: Any) -> Any:
        return ray.get(getattr(self.tier, method).remote(*args), timeout=patience(PATIENCE_S))

    def close(self) -> None:
        try:
            self.ask_tier("close")
        finally:
            ray.kill(self.tier, no_restart=True)
            ray.kill(self.manager)
