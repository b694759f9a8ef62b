"""A stand-in for a server: over HTTP, with answers that a real one gave (`recorded/`)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

sys.path.insert(0, str(Path(__file__).parent))  # pytest's importlib mode leaves the modules beside tests unimportable

from stand_in import StandIn, stand_in_server

from app.cli.__main__ import app


@pytest.fixture
def server() -> Iterator[StandIn]:
    with stand_in_server() as running:
        yield running


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CROSSKV_URL", "CROSSKV_API_KEY"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def crosskv(server: StandIn) -> Callable[..., Result]:
    """Run `crosskv` with these arguments against the stand-in."""

    def run(*arguments: str, **more: Any) -> Result:
        result = CliRunner().invoke(app, list(arguments), env={"CROSSKV_URL": server.url, "COLUMNS": "200"}, **more)
        assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
        assert "Traceback" not in result.output
        return result

    return run
