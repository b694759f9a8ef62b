"""GET /health: can a request be answered, and, for administrators, how is each part.

The route needs no key. The report of the parts (nodes, counts, other tenants' load) is for administrators only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from typing import Any, Literal

from fastapi import APIRouter
from pydantic import BaseModel
from starlette.responses import JSONResponse

from app.backend.protocols import HealthReport
from app.gate.admission import AdmissionQueue
from app.gate.request_context import current_request

TIMEOUT_S = 2.0
"""A probe must not hang because a part does."""


class Health(BaseModel):
    """`status`: ok, degraded (it serves, and a part is not well) or unavailable; the rest: for administrators only.

    `scenario`: the setting of that name, where there is one.
    """

    status: Literal["ok", "degraded", "unavailable"]
    scenario: str | None = None
    parts: dict[str, dict[str, Any]] = {}


def with_part(
    probe: Callable[[], Awaitable[HealthReport]], name: str, state: str
) -> Callable[[], Awaitable[HealthReport]]:
    """`probe` with one more part, whose state does not change."""

    async def health() -> HealthReport:
        report = await probe()
        return HealthReport(report.serving, {**report.parts, name: {"state": state}})

    return health


def health_router(
    probe: Callable[[], Awaitable[HealthReport]], queue: AdmissionQueue, scenario: str | None = None
) -> APIRouter:
    """200 while requests can be served, also when the cache cannot (`degraded`); 503 when they cannot."""
    router = APIRouter()

    @router.get("/health", response_model=Health, responses={503: {"model": Health, "description": "It cannot serve."}})
    async def show_health() -> JSONResponse:
        """Whether requests can be served; for administrators also the state of each part."""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                report = await probe()
        except Exception as error:
            report = HealthReport(False, {"backend": {"state": f"does not answer ({type(error).__name__})"}})
        parts: dict[str, Any] = {"ingress": {"state": "ok", "ongoing": queue.ongoing, "waiting": queue.waiting}}
        parts.update(report.parts)
        well = all(part.get("state") == "ok" for part in parts.values())
        status = ("ok" if well else "degraded") if report.serving else "unavailable"
        code = HTTPStatus.OK if report.serving else HTTPStatus.SERVICE_UNAVAILABLE
        shown: dict[str, Any] = {"scenario": scenario} if scenario else {}
        shown = {**shown, "parts": parts} if current_request().caller.admin else {}
        return JSONResponse({"status": status, **shown}, status_code=code.value)

    return router
