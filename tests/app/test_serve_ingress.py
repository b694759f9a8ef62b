"""A model that cannot be identified is served without shared KV, and /health says why."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from app.backend import serve as serve_backend
from app.backend.protocols import Backend, HealthReport
from app.serve_ingress import backend_as_shared
from configs.settings import Settings, load_settings


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[Settings]:
    """The settings of each backend that is built; the backends are well and do nothing."""
    settings_of: list[Settings] = []

    async def health() -> HealthReport:
        return HealthReport(True, {"replicas": {"state": "ok"}})

    def build(handle: Any, app_name: str, settings: Settings) -> Backend:
        settings_of.append(settings)
        nothing: Any = None
        return Backend(nothing, nothing, health)

    monkeypatch.setattr(serve_backend, "serve_backend", build)
    return settings_of


@pytest.mark.parametrize(("kv", "why"), [(True, None), (True, "nobody knows it"), (False, "nobody knows it")])
def test_what_cannot_be_identified_is_not_shared(
    built: list[Settings], monkeypatch: pytest.MonkeyPatch, kv: bool, why: str | None
) -> None:
    monkeypatch.setattr("app.serve_ingress.why_not_shared", lambda config: why)
    anything: Any = None
    backend = backend_as_shared(anything, "app", load_settings({"kv": {"enabled": kv}}), anything)

    parts = asyncio.run(backend.health()).parts
    assert built[0].kv.enabled == (kv and why is None), "no tier is expected where nothing is shared"
    off = {"kv_sharing": {"state": "off: nobody knows it"}} if kv and why else {}
    assert parts == {"replicas": {"state": "ok"}, **off}
