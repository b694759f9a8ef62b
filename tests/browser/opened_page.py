"""The page in a browser, with what it asked for and complained of."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from playwright.sync_api import Browser, ConsoleMessage, Page, Request, Route, expect

from load_tests.harness.patience import patience

expect.set_options(timeout=1000 * patience(20))
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 360, "height": 740}


@dataclass
class OpenedPage:
    """`complaints`: errors on its console and uncaught ones; `asked`: the URLs that it requested."""

    page: Page
    url: str
    complaints: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)
    sent: list[dict[str, Any]] = field(default_factory=list)
    """The bodies of its chat requests, since `usages` was called."""
    may_complain_of: tuple[str, ...] = ()
    """Parts of complaints that a test provokes."""

    def ask(self, text: str) -> None:
        """Send a message with the keyboard, and wait for the answer's end."""
        turns = self.page.locator(".turn.assistant[aria-busy]")
        prompt = self.page.get_by_label("Message", exact=True)
        prompt.fill(text)
        prompt.press("Enter")
        expect(self.page.locator(".turn.user .words").last).to_have_text(text)
        expect(turns).to_have_count(0)

    def usages(self) -> list[dict[str, Any]]:
        """A list that from now on gets the usage of every answer, as the API gives it to the page."""
        found: list[dict[str, Any]] = []

        def pass_on(route: Route) -> None:
            self.sent.append(route.request.post_data_json)
            answer = route.fetch()
            events = [json.loads(line[6:]) for line in answer.text().splitlines() if line.startswith("data: {")]
            found.extend(event["usage"] for event in events if event.get("usage"))
            route.fulfill(response=answer)

        self.page.route("**/v1/chat/completions", pass_on)
        return found

    def answer(self) -> Any:
        """The last answer."""
        return self.page.locator(".turn.assistant").last

    def shown_tokens(self) -> dict[str, int]:
        """The widths of the last answer's bar, as tokens by source."""
        spans = self.answer().locator(".sources span").all()
        return {str(span.get_attribute("class")): int(span.get_attribute("data-tokens") or -1) for span in spans}

    def close(self) -> None:
        """End it. Raises AssertionError for complaints that nobody provoked, and for what came from elsewhere."""
        self.page.context.close()
        wild = [one for one in self.complaints if not any(part in one for part in self.may_complain_of)]
        assert wild == []
        assert [url for url in self.asked if not url.startswith(self.url)] == [], "nothing comes from other hosts"


def opened(
    browser: Browser,
    url: str,
    may_complain_of: tuple[str, ...] = (),
    routes: Mapping[str, Callable[[Route], None]] | None = None,
    **options: Any,
) -> OpenedPage:
    """Open `url` in a new context, of Playwright's `options`; `routes` answer in the server's place."""
    context = browser.new_context(**{"viewport": WIDE, "reduced_motion": "reduce", **options})
    context.set_default_timeout(1000 * patience(30))
    page = context.new_page()
    # The browser itself writes a line for each answer of 4xx and 5xx, and the page shows those in words.
    made = OpenedPage(page, url, may_complain_of=(*may_complain_of, "Failed to load resource"))

    def hear(message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            made.complaints.append(message.text)

    def note(request: Request) -> None:
        if not request.url.startswith(("data:", "blob:")):
            made.asked.append(request.url)

    page.on("console", hear)
    page.on("pageerror", lambda error: made.complaints.append(str(error)))
    page.on("request", note)
    for pattern, answer in (routes or {}).items():
        page.route(pattern, answer)
    page.goto(f"{url}/")
    expect(page.locator("#server-state")).not_to_be_empty()
    return made
