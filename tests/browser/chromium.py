"""A Chromium for tests of the page: the machine's own, or Playwright's (`requirements/chromium.sh` installs one)."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, Error, sync_playwright

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
    "no Chromium is here, which the tests of the page need: requirements/chromium.sh installs one where apt-get or "
    "Playwright's download works; or put `chromium` on the PATH, or name one, CROSSKV_CHROMIUM=/path/to/chromium; "
    "CROSSKV_CHROMIUM=none leaves the page untested"
)


def executable() -> str | None:
    """The path of a Chromium on this machine; None too where CROSSKV_CHROMIUM says that the page is left out."""
    named = os.environ.get("CROSSKV_CHROMIUM")
    if named:
        return None if named == "none" else named
    own = sorted(str(path) for path in BROWSERS.glob("chromium*/*/*") if path.name in SHELLS)
    found = [path for name in NAMES if (path := shutil.which(name))]
    return next(iter([*found, *own, *map(str, _downloaded())]), None)


def _downloaded() -> list[Path]:
    """Playwright's own cache, of a user who has it already."""
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
        try:
            browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        except Error as error:
            pytest.fail(f"{path} does not start ({error.message.splitlines()[0]}); {MISSING}", pytrace=False)
        yield browser
        browser.close()
