"""The ingress's side of Serve: handle calls keep apart, and /health says which replica does not report."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from ray.serve.context import _get_serve_request_context, _RequestContext, _serve_request_context

from app.replica_handle import HealthReport
from app.serve_backend import SILENT_S, PartsWatch, health_probe, outside_http_request
from configs.settings import load_settings
from deployments.manager_client import ManagerUnavailableError


class FakeManager:
    """Answers `parts` with what it is given, or is gone."""

    def __init__(self, parts: dict[str, Any] | None) -> None:
        self.parts = parts

    async def ask(self, method: str, *args: Any, timeout_s: float) -> Any:
        assert method == "parts"
        if self.parts is None:
            raise ManagerUnavailableError("the KV manager is not running")
        return self.parts


def health(parts: dict[str, Any] | None) -> HealthReport:
    async def probe() -> HealthReport:
        watch = PartsWatch(FakeManager(parts))  # type: ignore[arg-type]
        await asyncio.sleep(0.01)
        return await health_probe(watch, load_settings({"replicas": 2}))()

    return asyncio.run(probe())


def test_a_call_outside_the_http_request_does_not_carry_its_internal_id() -> None:
    token = _serve_request_context.set(_RequestContext(_internal_request_id="of-the-http-request"))
    try:
        inside = _get_serve_request_context()._internal_request_id
        outside = outside_http_request(lambda: _get_serve_request_context()._internal_request_id)
    finally:
        _serve_request_context.reset(token)

    assert inside == "of-the-http-request"
    assert outside == ""


def test_all_is_well_when_every_replica_reports() -> None:
    report = health({"replicas": {0: 0.1, 1: 1.9}, "cpu_tiers": ["node"]})

    assert report.serving
    assert {part["state"] for part in report.parts.values()} == {"ok"}


@pytest.mark.parametrize("replicas", [{0: 0.1, 1: SILENT_S + 1}, {0: 0.1}])
def test_a_replica_that_does_not_report_is_named_missing(replicas: dict[int, float]) -> None:
    report = health({"replicas": replicas, "cpu_tiers": ["node"]})

    assert report.serving
    assert report.parts["replicas"] == {"state": "1 of 2 missing", "running": [0]}


def test_without_any_replica_nothing_is_served() -> None:
    assert not health({"replicas": {}, "cpu_tiers": ["node"]}).serving


def test_a_manager_that_is_gone_is_named_and_requests_go_on() -> None:
    report = health(None)

    assert report.serving
    assert report.parts["kv_manager"]["state"] == "the KV manager is not running"


def test_a_missing_cpu_tier_is_named() -> None:
    assert health({"replicas": {0: 0, 1: 0}, "cpu_tiers": []}).parts["cpu_tier"]["state"] == "missing"
