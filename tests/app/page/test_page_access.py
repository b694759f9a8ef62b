"""The page by axe-core's rules (WCAG 2.2 A and AA among them), in light and dark, wide and narrow."""

from __future__ import annotations

import pytest
from axe_playwright_python.sync_playwright import Axe
from fake_backend import FakeReplicas
from live_events import DIRECTIVE, ROUTE, cache, in_the_servers_place, node
from opened_page import PHONE, WIDE
from page_scripts import HOSTILE, answering
from playwright.sync_api import expect

BOTH_HELD = pytest.mark.long("tests/app/page/test_page_access.py::test_axe_finds_nothing")
"""Each scheme and each width is looked at in `make test`, and the other pairs of them in `make test-long`."""


def violations(page) -> list[str]:
    """What axe finds, one line each: the rule, and where."""
    found = Axe().run(page).response["violations"]
    return [f"{one['id']}: {node['target']} {node['failureSummary']}" for one in found for node in one["nodes"]]


@pytest.mark.parametrize(
    ("viewport", "scheme"),
    [
        pytest.param(WIDE, "dark", id="wide-dark"),
        pytest.param(PHONE, "light", id="phone-light"),
        pytest.param(WIDE, "light", id="wide-light", marks=BOTH_HELD),
        pytest.param(PHONE, "dark", id="phone-dark", marks=BOTH_HELD),
    ],
)
def test_axe_finds_nothing(start, open_page, scheme: str, viewport: dict[str, int]):
    server = start(FakeReplicas(answering(HOSTILE, blended=3, reason="hit")))
    routes = in_the_servers_place(
        [("cache", cache("away")), ("route", ROUTE), ("directive", DIRECTIVE)], [node(1), node(2, 1)]
    )
    opened = open_page(server.url, color_scheme=scheme, viewport=viewport, routes=routes)
    page = opened.page
    assert violations(page) == [], "before the first question"
    page.locator("#document-file").set_input_files({"name": "a.txt", "mimeType": "text/plain", "buffer": b"Anna."})
    page.locator("#settings summary").click()
    page.get_by_label("Fidelity").select_option("blended")
    opened.ask("Where is the red ball, and whose is it?")
    expect(opened.answer().locator("table")).to_be_visible()
    assert violations(page) == [], "with an answer"
    page.get_by_role("button", name="Edit").click()
    assert violations(page) == [], "while a turn is edited"
    if viewport is PHONE:
        page.get_by_role("button", name="Cache").click()
    expect(page.get_by_role("application")).to_have_attribute("data-nodes", "2")
    page.get_by_role("application").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#trie-node")).to_contain_text("256 tokens")
    expect(page.locator("#routes li").first).to_be_visible()
    assert violations(page) == [], "with the cache's figures"


def test_axe_finds_what_is_wrong(start, open_page):
    """Its other tests would pass with an axe that does not run."""
    page = open_page(start().url).page
    page.locator("#server-state").evaluate("one => { one.style.color = '#ddd'; one.style.background = '#eee'; }")
    page.locator("label[for=api-key]").evaluate("one => one.remove()")
    found = {one.partition(":")[0] for one in violations(page)}
    assert "color-contrast" in found


def test_nothing_moves_for_who_asked_for_that(start, open_page):
    page = open_page(start().url, reduced_motion="reduce").page
    page.locator("#tiers").evaluate(
        """box => { const meter = document.createElement('div'); meter.className = 'meter';
                    meter.append(document.createElement('span')); box.append(meter); }"""
    )
    assert page.evaluate("getComputedStyle(document.querySelector('.meter span')).transitionProperty") == "none"
