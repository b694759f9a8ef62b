"""A Chromium for tests of the page: the machine's own, or Playwright's (`requirements/chromium.sh` installs one)."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from configs.model_folder import PROJECT_ROOT
from load_tests.harness.patience import until

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome", "chrome")
FLAGS = (
    "--headless",
    "--remote-debugging-port=0",  # one that is free
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-background-timer-throttling",
    "--disable-backgrounding-occluded-windows",
    "--disable-renderer-backgrounding",
    "--disable-back-forward-cache",
    "--disable-breakpad",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-features=Translate,MediaRouter,OptimizationHints",
    "--disable-hang-monitor",
    "--disable-popup-blocking",
    "--disable-search-engine-choice-screen",
    "--disable-sync",
    "--force-color-profile=srgb",
    "--hide-scrollbars",
    "--metrics-recording-only",
    "--no-default-browser-check",
    "--no-first-run",
    "--password-store=basic",
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


def _text(file: Path) -> str:
    """What a file has, which may not be there yet."""
    return file.read_text("utf-8", errors="replace") if file.exists() else ""


@contextlib.contextmanager
def _listening(path: str) -> Iterator[str]:
    """The address at which a Chromium listens that this process has started.

    Playwright would start it in a session of its own. Linux shares a machine out by sessions (`sched_autogroup`), and
    on two busy cores a browser's was seen to get a hundredth of what its twenty runnable threads asked for.
    """
    with tempfile.TemporaryDirectory(prefix="crosskv-chromium-", ignore_cleanup_errors=True) as home:
        port, said = Path(home, "DevToolsActivePort"), Path(home, "said")
        with said.open("wb") as out:
            chromium = subprocess.Popen(
                [path, *FLAGS, f"--user-data-dir={home}"],
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, process_group=0,
            )  # fmt: skip
        try:
            until(lambda: "\n" in _text(port) or chromium.poll() is not None, f"{path} listens")
            if chromium.poll() is not None:
                pytest.fail(f"{path} does not start ({_text(said)[-500:]}); {MISSING}", pytrace=False)
            number, route = _text(port).split("\n")[:2]
            yield f"ws://127.0.0.1:{number}{route}"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(chromium.pid, signal.SIGKILL)
            chromium.wait()


@contextlib.contextmanager
def started_chromium() -> Iterator[Browser]:
    """A running browser; skips the test, with the reason, where there is none.

    While it runs, its thread has a running event loop: no `asyncio.run` beside it. So it is a module's, no session's.
    """
    path = executable()
    if path is None:
        pytest.skip(MISSING)
    with _listening(path) as address, sync_playwright() as playwright:
        browser = playwright.chromium.connect_over_cdp(address)
        yield browser
        browser.close()
