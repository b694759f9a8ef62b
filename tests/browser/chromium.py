"""A Chromium for tests of the page: the machine's own, or Playwright's (`requirements/chromium.sh` installs one)."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from configs.model_folder import PROJECT_ROOT

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)
SHELLS = ("headless_shell", "chrome-headless-shell", "chrome")
BROWSERS = PROJECT_ROOT / ".venv" / "browsers"
"""Where `requirements/chromium.sh` has Playwright put its own."""
MISSING = (
    "NO CHROMIUM: the page is not tested here. requirements/chromium.sh installs one where apt-get or Playwright's "
    "download works; or put `chromium` on the PATH, or name one: CROSSKV_CHROMIUM=/path/to/chromium."
)


def executable() -> str | None:
    """The path of a Chromium on this machine."""
    named = os.environ.get("CROSSKV_CHROMIUM")
    if named:
        return named
    own = sorted(str(path) for path in BROWSERS.glob("chromium*/*/*") if path.name in SHELLS)
    found = [path for name in NAMES if (path := shutil.which(name))]
    return next(iter([*found, *own, *map(str, _downloaded())]), None)


def _downloaded() -> list[Path]:
    """Playwright's own cache, of somebody who uses it already."""
    cache = Path(os.environ.get("PLAYWRIGHT_BROWSERS_PATH", Path.home() / ".cache" / "ms-playwright"))
    return [path for path in sorted(cache.glob("chromium*/*/*")) if path.name in SHELLS]


@contextlib.contextmanager
def started_chromium() -> Iterator[Browser]:
    """A running browser; skips the test, with the reason, where there is none.

    While it runs, its thread has a running event loop: no `asyncio.run` beside it. So it is a module's, no session's.
    """
    path = executable()
    if path is None:
        pytest.skip(MISSING)
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield browser
        browser.close()
