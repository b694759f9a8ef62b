"""What nobody expected: 500 without internals, and a line of the log that a request's path cannot end."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from starlette.testclient import TestClient

from app.gate.errors import DefectMiddleware


async def broken(scope: Any, receive: Any, send: Any) -> None:
    raise RuntimeError("secret")


def test_a_defect_is_500_and_one_line_of_log_whatever_the_path_holds(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.ERROR)
    answer = TestClient(DefectMiddleware(broken)).get("/a%0aINFO%20forged%0d%1b[2J")
    assert (answer.status_code, answer.json()["error"]["message"]) == (500, "Internal server error")
    assert "secret" not in answer.text
    (said,) = [record.getMessage() for record in caplog.records if record.name == "app.gate.errors"]
    assert said == r"GET '/a\nINFO forged\r\x1b[2J' failed"
