"""What a replica says of its load, and its good-bye, without an engine."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.core import GaugeMetricFamily

from deployments.engine import handle as room_module
from deployments.engine.handle import EngineHandle
from deployments.protocol.manager_client import ManagerUnavailableError
from deployments.protocol.wire import GenerateRequest
from deployments.replica.prompt_plans import PromptPlans
from deployments.replica.replica import Replica


class Service:
    def __init__(self, blocks: int, free: int) -> None:
        self._usage = {"blocks": blocks, "free_blocks": free, "cached_blocks": 100}

    async def usage(self) -> dict[str, int]:
        return self._usage


def replica(service: Service | None = None) -> Any:
    made: Any = object.__new__(Replica)
    made._engine = object.__new__(EngineHandle)
    made._engine._service, made._engine._begun = service, {}
    made._engine.close = lambda: None
    made._plans = PromptPlans(None, 32)
    made._link, made._ending = None, False
    return made


def load_of(one: Any) -> dict[str, float]:
    found: dict[str, float] = asyncio.run(one.record_autoscaling_stats())
    assert all(type(value) is float for value in found.values()), "Serve takes no stats at all of another type"
    return found


async def queue(one: Any, tokens: int) -> Any:
    params: Any = SimpleNamespace(skip_reading_prefix_cache=False)
    return await one._plans.ask(GenerateRequest("r", [0] * tokens, params, "salt", []))


def test_an_idle_replica_has_no_load_although_its_device_is_full_of_cached_kv() -> None:
    assert set(load_of(replica(Service(101, 100))).values()) == {0.0}


def test_what_waits_counts_in_seconds_and_what_runs_in_blocks() -> None:
    one = replica(Service(101, 40))
    one._engine._begun = {"a": False, "b": True, "c": False}
    plan = asyncio.run(queue(one, 500))
    assert load_of(one) == {}, "nobody knows yet how long 500 tokens take"
    one._plans.report_prefill(1000, 2.0, 0)
    assert load_of(one) == {
        "queued_prefill_s": pytest.approx(1.0),
        "kv_pressure": pytest.approx(0.6),
        "ongoing": 3.0,
        "waiting": 2.0,
    }
    plan.begun()
    assert load_of(one)["queued_prefill_s"] == 0.0


def test_without_shared_kv_the_rate_is_that_of_whole_prompts() -> None:
    one = replica(Service(101, 100))
    params: Any = SimpleNamespace(skip_reading_prefix_cache=False)
    plan = asyncio.run(one._plans.ask(GenerateRequest("r", [0] * 400, params, "salt", [])))
    times = SimpleNamespace(scheduled_ts=5.0, first_token_ts=7.0)
    plan.ended(SimpleNamespace(kv_transfer_params=None, metrics=times))
    assert load_of(one)["queued_prefill_s"] == pytest.approx(2.0)


def test_without_shared_kv_vllm_says_how_full_its_device_is(monkeypatch: pytest.MonkeyPatch) -> None:
    gauge = GaugeMetricFamily("vllm:kv_cache_usage_perc", "", value=0.25)
    monkeypatch.setattr(room_module, "vllm_pressure", lambda: max((s.value for s in gauge.samples), default=None))
    assert load_of(replica())["kv_pressure"] == 0.25
    gauge.samples.clear()
    assert load_of(replica()) == {}


@pytest.mark.parametrize(("dies", "told"), [(False, [("replica_ends", "me")]), (True, [])])
def test_only_one_that_serve_takes_away_says_good_bye(dies: bool, told: list[Any]) -> None:
    """One whose engine is dead has said so already, with the reason."""
    said: list[Any] = []
    one, closed = replica(), SimpleNamespace(close=lambda: None)
    one._name, one._link, one._engine, one._ending = "me", closed, closed, dies
    one._manager = SimpleNamespace(tell=lambda *call: said.append(call))
    one.__del__()
    assert said == told


def test_a_manager_that_is_gone_keeps_no_replica_from_ending() -> None:
    ended: list[str] = []

    def nobody(*call: Any) -> None:
        raise ManagerUnavailableError

    one = replica()
    one._name, one._link = "me", SimpleNamespace(close=lambda: None)
    one._engine, one._manager = SimpleNamespace(close=lambda: ended.append("engine")), SimpleNamespace(tell=nobody)
    one.__del__()
    assert ended == ["engine"]
