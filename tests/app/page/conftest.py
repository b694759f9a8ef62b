"""A browser for the tests of the page, and the page before the ingress with stand-ins for what is behind it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # pytest's importlib mode leaves the modules beside tests unimportable
sys.path.insert(0, str(Path(__file__).parents[2] / "browser"))

from chromium import started_chromium
from opened_page import OpenedPage, opened


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with started_chromium() as running:
        yield running


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., OpenedPage]]:
    """Open the page of a server, in a context of its own; whatever it complains of on the console fails the test."""
    made: list[OpenedPage] = []

    def opener(url: str, **options: Any) -> OpenedPage:
        made.append(opened(browser, url, **options))
        return made[-1]

    yield opener
    for page in made:
        page.close()
