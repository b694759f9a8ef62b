"""The page before the real server: its tour, and its bars beside what the API says."""

from __future__ import annotations

import os
import re
from typing import Any

import httpx
import pytest
from chromium import started_chromium
from opened_page import OpenedPage, opened
from playwright.sync_api import expect

from app.metrics.usage import SOURCES
from load_tests.harness.patience import patience
from load_tests.harness.server import RunningServer

pytestmark = pytest.mark.server

PATIENCE_MS = 1000 * patience(60)


def step(page: OpenedPage, number: int) -> None:
    """Take a step of the tour, and wait until it is done."""
    item = page.page.locator("#tour-steps li").nth(number)
    item.get_by_role("button").click()
    expect(item).to_have_class("done", timeout=PATIENCE_MS)


def wait_until_saved(server: RunningServer, chat: dict[str, Any]) -> None:
    """Until the CPU tier has the prompt of a chat's request, but for its last block."""
    tokens = httpx.post(f"{server.url}/tokenize", json=chat, timeout=patience(60)).json()["tokens"]
    server.wait_until(lambda: server.lookup(tokens)["cpu"] >= len(tokens) // 32 - 1, "it is saved")


def test_the_tour_shows_what_the_cache_does(server: RunningServer) -> None:
    with started_chromium() as browser:

        def taken() -> tuple[OpenedPage, list[dict[str, Any]]]:
            """A page whose tour has been taken, and the usages that it was told."""
            page = opened(browser, server.url)
            page.page.on("dialog", lambda box: box.accept())
            usages = page.usages()
            expect(page.page.locator("#live-state")).to_have_text("Live.")
            page.page.wait_for_function("() => document.querySelector('#replica').options.length > 2")
            for number in range(5):
                step(page, number)
                if number != 3:
                    kv = usages[-1]["kv_cache"]
                    assert page.shown_tokens() == {source: kv[source] for source in SOURCES if kv[source]}
                    assert sum(page.shown_tokens().values()) == usages[-1]["prompt_tokens"]
                    expect(page.answer().locator(".words")).to_have_text("Anna lives in Oslo.")
                if number == 0:
                    wait_until_saved(server, page.sent[0])
            return page, usages

        page, usages = server.in_time(taken)
        first, again, elsewhere, after_clear = usages
        reused = [(one["prompt_tokens"] - one["kv_cache"]["recomputed"], one["prompt_tokens"]) for one in usages]
        told = [f"{100 * tokens // total}% reused" for tokens, total in reused]
        expect(page.page.locator("#tour-steps li .result")).to_contain_text([*told[:3], "", told[3]])
        assert again["kv_cache"]["recomputed"] < first["kv_cache"]["recomputed"] or first["kv_cache"]["device"]
        assert elsewhere["kv_cache"]["replica"] != again["kv_cache"]["replica"]
        assert after_clear["kv_cache"]["recomputed"] < after_clear["prompt_tokens"] / 2, "the shared tiers had it"
        lines = page.page.locator("#routes li")
        expect(lines).to_have_count(4)
        for line, usage in zip(lines.all(), reversed(usages), strict=True):
            kv = usage["kv_cache"]
            expect(line).to_contain_text(f"replica {kv['replica']}, {kv['reason']}, {usage['prompt_tokens']:,} tokens")
        expect(page.page.locator("#saved-number")).to_have_text(re.compile(r"[1-9]"), timeout=PATIENCE_MS)
        expect(page.page.locator("#saved-unit")).to_contain_text("seconds")
        page.page.wait_for_function("() => Number(document.querySelector('#trie').dataset.nodes) > 0")
        if path := os.environ.get("CROSSKV_SCREENSHOT"):
            page.page.set_viewport_size({"width": 1280, "height": 1020})
            page.page.wait_for_timeout(1000)
            page.page.screenshot(path=path)
        page.close()
