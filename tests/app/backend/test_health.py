"""What /health says of the parts, by what the manager tells and by who lives."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

import pytest

from app.backend import parts_watch as parts_module
from app.backend.parts_watch import SILENT_S, PartsWatch, health_probe
from app.backend.protocols import HealthReport
from configs.settings import load_settings
from deployments.protocol.manager_client import ManagerUnavailableError
from kvmanager.scheduling.rebalancing import KVReport


class FakeManager:
    """Answers `parts` with what it is given, or is gone."""

    def __init__(self, parts: dict[str, Any] | None) -> None:
        self.parts = parts

    async def ask(self, method: str, *args: Any, timeout_s: float) -> Any:
        assert (method, args) == ("api", ("parts",))
        if self.parts is None:
            raise ManagerUnavailableError("the KV manager is not running")
        return self.parts


def health(parts: dict[str, Any] | None, living: Collection[str] | None = "ab", **kv: Any) -> HealthReport:
    async def probe() -> HealthReport:
        watch = PartsWatch(FakeManager(parts))  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        known = None if living is None else frozenset(living)
        return await health_probe(watch, lambda: known, load_settings({"replicas": 2, "kv": kv}))()

    return asyncio.run(probe())


def reporting(**silence_s: float) -> dict[str, tuple[int, float]]:
    """What the manager says of replicas: a has rank 0, b rank 1."""
    return {name: ("ab".index(name), seconds) for name, seconds in silence_s.items()}


def test_what_is_heard_of_the_pools_is_forgotten_with_the_manager() -> None:
    async def check() -> None:
        said = {**ALL_WELL, "roles": {"a": "decode"}, "kv": {"a": KVReport(1.0, 100, 50)}}
        manager = FakeManager(said)
        watch = PartsWatch(manager)  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        assert (watch.roles, watch.kv) == (said["roles"], said["kv"])
        manager.parts, gone = None, PartsWatch(manager)  # type: ignore[arg-type]
        gone.hear(said)
        await asyncio.sleep(0.01)
        assert (gone.roles, gone.kv) == (said["roles"], {})

    asyncio.run(check())


def test_an_answer_that_cannot_be_read_is_an_absent_manager_and_the_next_one_is_heard() -> None:
    async def check() -> None:
        manager = FakeManager({"replicas": None})
        watch = PartsWatch(manager)  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        assert watch.error
        assert not watch.silence_s
        manager.parts = ALL_WELL
        for _ in range(1000):
            await asyncio.sleep(0.001)
            if not watch.error:
                break
        assert watch.error == ""

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(parts_module, "PARTS_EVERY_S", 0.001)
        asyncio.run(check())


def test_all_is_well_when_every_replica_lives_and_reports() -> None:
    report = health({"replicas": reporting(a=0.1, b=1.9), "cpu_tiers": ["node"]})

    assert report.serving
    assert {part["state"] for part in report.parts.values()} == {"ok"}
    assert report.parts["replicas"]["running"] == [0, 1]


def test_a_replica_that_does_not_report_is_named_missing() -> None:
    report = health({"replicas": reporting(a=0.1, b=SILENT_S + 1), "cpu_tiers": ["node"]})

    assert report.serving
    assert report.parts["replicas"] == {"state": "1 of 2 missing", "running": [0]}


@pytest.mark.parametrize(("living", "serving"), [({"a"}, True), (set(), False)])
def test_a_dead_replica_is_missing_though_the_manager_heard_of_it_a_moment_ago(living: set[str], serving: bool) -> None:
    report = health({"replicas": reporting(a=0.1, b=0.1), "cpu_tiers": ["node"]}, living)

    assert report.serving is serving
    assert report.parts["replicas"] == {"state": f"{2 - len(living)} of 2 missing", "running": [0][: len(living)]}


def test_a_replica_that_lives_and_has_not_told_the_manager_its_number_is_missing() -> None:
    report = health({"replicas": reporting(a=0.1), "cpu_tiers": ["node"]})

    assert report.parts["replicas"] == {"state": "1 of 2 missing", "running": [0]}


def test_a_manager_that_knows_nobody_yet_makes_no_replica_missing() -> None:
    report = health({"replicas": {}, "cpu_tiers": ["node"]})

    assert report.serving
    assert report.parts["replicas"]["state"] == "ok"


def test_a_manager_that_is_gone_is_named_and_requests_go_on() -> None:
    report = health(None)

    assert report.serving
    assert report.parts["kv_manager"]["state"] == "the KV manager is not running"
    assert report.parts["replicas"]["state"] == "ok"


def test_a_missing_cpu_tier_is_named() -> None:
    assert health({**ALL_WELL, "cpu_tiers": []}).parts["cpu_tier"]["state"] == "missing"


ALL_WELL = {"replicas": reporting(a=0, b=0), "cpu_tiers": ["node"]}


@pytest.mark.parametrize("state", ["ok", "Redis does not answer"])
def test_redis_is_a_part_with_its_state_and_never_makes_the_server_unavailable(state: str) -> None:
    redis = {"state": state, "indexing": True, "segments": 7}
    report = health({**ALL_WELL, "redis": redis})

    assert report.serving
    assert report.parts["redis"] == redis


@pytest.mark.parametrize("kv", [{"redis_url": None}, {"enabled": False}], ids=str)
def test_redis_is_no_part_of_a_server_without_it(kv: dict[str, Any]) -> None:
    assert "redis" not in health({**ALL_WELL, "redis": {"state": "ok"}}, **kv).parts


@pytest.mark.parametrize("parts", [ALL_WELL, {**ALL_WELL, "redis": None}], ids=["absent", "none"])
def test_a_manager_that_says_nothing_of_redis_is_believed(parts: dict[str, Any]) -> None:
    assert set(health(parts).parts) == {"kv_manager", "replicas", "cpu_tier"}


def test_a_replica_that_shares_no_kv_though_others_do_is_named_with_its_reason() -> None:
    said = {**ALL_WELL, "apart": {1: "the processors of this node are of another kind"}}
    assert "kv_sharing" not in health(ALL_WELL).parts
    state = health(said).parts["kv_sharing"]["state"]
    assert state == "off at replica 1: the processors of this node are of another kind"


@pytest.mark.parametrize("parts", [None, {"replicas": {}, "cpu_tiers": []}, ALL_WELL], ids=["away", "new", "knows"])
def test_before_serve_has_told_nothing_is_served(parts: dict[str, Any] | None) -> None:
    report = health(parts, None)
    assert not report.serving
    assert report.parts["replicas"]["state"] != "ok"
