"""The cache beside the chat: what the server's events and its trie say is what the page shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from fake_backend import FakeControl, FakeReplicas, backend
from live_events import DIRECTIVE, MIB, ROUTE, Event, cache, in_the_servers_place, node
from opened_page import OpenedPage
from page_scripts import answering
from playwright.sync_api import Request, expect


@pytest.fixture
def live_page(server: Any, open_page: Callable[..., OpenedPage]) -> Callable[..., OpenedPage]:
    """Open the page over these events and this trie."""

    def opener(events: list[Event], nodes: Sequence[dict[str, Any]] = (), **options: Any) -> OpenedPage:
        return open_page(server.url, routes=in_the_servers_place(events, list(nodes)), **options)

    return opener


def test_figures_decisions_and_orders_are_shown(live_page):
    events = [("cache", cache()), ("route", ROUTE), ("directive", DIRECTIVE), ("dropped", {"events": 2})]
    page = live_page(events).page
    expect(page.locator("#saved-number")).to_have_text("12.50")
    expect(page.locator("#tier-cpu .text")).to_contain_text("3.0 MiB of 12 MiB · hits 50%")
    assert page.locator("#tier-cpu .meter span").evaluate("one => one.style.width") == "25%"
    expect(page.locator("#replicas tbody tr")).to_have_count(2)
    expect(page.locator("#replicas tbody tr").first).to_contain_text("1 (1,200 tokens)")
    expect(page.locator("#replicas")).to_contain_text("4 under way, 3 in the queue")
    expect(page.locator("#routes li").first).to_contain_text("replica 1, hit, 100 tokens")
    widths = page.locator("#routes li").first.locator(".sources span")
    assert [int(one.get_attribute("data-tokens")) for one in widths.all()] == [32, 64, 4]
    expect(page.locator("#directives li").first).to_have_text("evict from CPU: 3 segments")
    expect(page.locator("#replica option")).to_have_text(["the router chooses", "0", "1"])


def test_tokens_stand_for_seconds_until_there_is_a_rate(live_page):
    said = cache(saved_prefill_s=None, hit_tokens={"device": 1000, "cpu": 200, "redis": 34})
    page = live_page([("cache", said)]).page
    expect(page.locator("#saved")).to_contain_text("1,234 tokens")


def test_seconds_by_few_measurements_say_so(live_page):
    page = live_page([("cache", cache(saved_prefill_s=0.31, saved_is_early=True))]).page
    expect(page.locator("#saved")).to_have_text("0.31 seconds, by the first measurements")


def test_lists_of_what_happens_do_not_grow_for_ever(live_page):
    page = live_page([("route", ROUTE)] * 200).page
    expect(page.locator("#routes li")).to_have_count(30)


def test_a_manager_that_is_away_is_named_and_the_chat_goes_on(live_page):
    events = [("cache", cache())]
    opened = live_page(events)
    expect(opened.page.locator("#tier-redis .text")).to_contain_text("3.0 MiB of 12 MiB")
    events[:] = [("cache", cache("away", saved_prefill_s=13.0))] * 2
    expect(opened.page.locator("#saved-number")).to_have_text("13.00")
    opened.page.wait_for_function("() => document.querySelector('#live-state').className === 'bad'")
    seen = opened.page.evaluate(
        """() => new Promise(done => { const state = document.querySelector('#live-state');
            const look = () => state.textContent.includes('manager is away') && done(true);
            look(); new MutationObserver(look).observe(state, {childList: true}); })"""
    )
    assert seen
    expect(opened.page.locator("#tier-redis .text")).to_contain_text("3.0 MiB of 12 MiB")
    opened.ask("Are you there?")
    expect(opened.answer().locator(".words")).to_have_text("one two three")


def test_what_a_server_says_is_text_here_too(live_page):
    bad = "<img src=x onerror=window.caught=1>"
    said = {"id": bad, "replica": bad, "reason": bad, "tokens": None, "prompt_tokens": 1}
    place = {"tier": bad, "holder": bad}
    order = {"number": 1, "kind": bad, "source": place, "target": place, "segments": 1, "outcome": bad}
    page = live_page([("route", said), ("directive", order)]).page
    expect(page.locator("#routes li").first).to_contain_text(bad)
    expect(page.locator("#directives li").first).to_contain_text(bad)
    assert page.locator("#live img").count() == 0


def test_clearing_a_tier_asks_first(server, live_page):
    opened = live_page([("cache", cache())])
    asked: list[Any] = []
    opened.page.on("request", lambda one: asked.append(one.post_data_json) if "/clear" in one.url else None)
    answers = iter([False, True])
    opened.page.on("dialog", lambda box: box.accept() if next(answers) else box.dismiss())
    button = opened.page.get_by_role("button", name="Clear the Redis tier")
    button.click()
    button.click()
    expect(opened.page.locator("#notice")).to_have_text("Cleared: redis.")
    assert asked == [{"tiers": ["redis"]}]


def test_a_node_is_found_by_mouse_and_keyboard_and_says_what_it_is(live_page):
    nodes = [node(1, children=2), node(2, 1, kind="answer", pinned=True, hidden=5, children=5), node(3, 1, hotness=0)]
    page = live_page([("cache", cache())], nodes).page
    trie = page.get_by_role("application")
    expect(trie).to_have_attribute("aria-label", "Trie of cached prefixes: 3 nodes shown, 7 beginnings hidden")
    trie.focus()
    steps = [("Right", "Prompt, 256 tokens"), ("Right", "Answer"), ("Down", "Prompt"), ("Up", "pinned")]
    for key, said in steps:
        page.keyboard.press(f"Arrow{key}")
        expect(page.locator("#trie-node")).to_contain_text(said)
    text = page.locator("#trie-node").inner_text()
    for part in ("3.3 uses", "hotness 0.75", "device of replica 0", "CPU 2.0 MiB", "5 follow, 5 of them not shown"):
        assert part in text
    expect(page.locator("#trie-node").get_by_role("button")).to_have_text(
        ["Open", "Unpin", "Evict", "Bring to replica 1", "Move to replica 1"]
    )
    place = trie.bounding_box()
    page.mouse.click(place["x"] + 20, place["y"] + place["height"] / 2)
    expect(page.locator("#trie-node")).to_contain_text("2 follow")
    with page.expect_request(lambda one: f"root={nodes[0]['id']}" in one.url):
        page.get_by_role("button", name="Open").click()
    expect(page.get_by_role("button", name="Whole trie")).to_be_visible()


def test_where_a_model_with_states_can_be_resumed_is_marked_said_and_told_by_the_mouse(live_page):
    landings = [
        {"end_token": 1280, "tiers": {"cpu": 2 * MIB, "redis": MIB}},
        {"end_token": 1536, "tiers": {"cpu": 0, "redis": MIB}},
    ]
    said = "can be resumed at 1,280 tokens (CPU 2.0 MiB, Redis 1.0 MiB) and 1,536 tokens (Redis 1.0 MiB)"
    page = live_page([("cache", cache())], [node(1, children=1, landings=landings), node(2, 1)]).page
    trie = page.get_by_role("application")
    expect(trie).to_have_attribute(
        "aria-label", "Trie of cached prefixes: 2 nodes shown, 1 of them can be resumed in, 7 beginnings hidden"
    )
    expect(trie).to_have_attribute("data-drawn", "2")
    trie.focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#trie-node")).to_contain_text(said)
    page.keyboard.press("ArrowRight")
    expect(page.locator("#trie-node")).not_to_contain_text("resumed")
    place = trie.bounding_box()
    page.mouse.move(place["x"] + 20, place["y"] + place["height"] / 2)
    expect(trie).to_have_attribute("title", said)
    page.mouse.move(place["x"] + 20, place["y"] + 5)
    expect(trie).to_have_attribute("title", "")
    signs = """async () => { const {drawTrie} = await import('./page/trie_drawing.js');
        const sign = node => { const bars = [], canvas = document.createElement('canvas');
            const pen = canvas.getContext('2d'), fill = pen.fillRect;
            pen.fillRect = (...at) => { bars.push(at); fill.apply(pen, at); };
            Object.defineProperties(canvas, {clientWidth: {value: 100}, clientHeight: {value: 100}});
            drawTrie(canvas, [[node, null]], null, () => [50, 50], 1);
            return bars.length; };
        const node = {id: 'a', kind: 'answer', hotness: 0, tiers: {cpu: 1}};
        return [sign(node), sign({...node, landings: []}), sign({...node, landings: [{end_token: 1}]})]; }"""
    assert page.evaluate(signs) == [0, 0, 1]


def test_a_server_that_stops_is_said_to_restart_until_it_is_there_again(live_page):
    events = [("cache", cache()), ("restarting", {})]
    opened = live_page(events)
    state = opened.page.locator("#live-state")
    expect(state).to_contain_text("restarting")
    events[:] = [("cache", cache())]
    expect(state).to_contain_text("ended the live view")


def test_the_trie_is_read_anew_when_something_has_happened_and_else_now_and_then(live_page):
    events = [("cache", cache())]
    opened = live_page(events, [node(1)])
    page, trie = opened.page, "**/api/v1/kv/trie?*"

    def reads() -> int:
        return sum("/kv/trie?" in url for url in opened.asked)

    page.clock.install()
    page.reload()
    expect(page.locator("#live-state")).to_contain_text("ended the live view")
    with page.expect_request(trie):
        page.clock.run_for(3_000)
    before = reads()
    with page.expect_request("**/api/v1/events"):
        page.clock.run_for(9_000)
    assert reads() == before, "the figures are the same"
    index = {"nodes": 2, "ghosts": 0, "pins": 0}
    for more, event in (({"index": index}, None), ({"index": index}, ("route", ROUTE))):
        events[:] = [*([event] if event else []), ("cache", cache(saved_prefill_s=13.0 + bool(event), **more))]
        page.clock.run_for(3_000)
        expect(page.locator("#saved-number")).to_have_text(f"{13 + bool(event)}.00")
        with page.expect_request(trie):
            page.clock.run_for(3_000)
    events[:] = [("cache", cache(index=index))]
    with page.expect_request(trie):
        page.clock.run_for(31_000)


def test_a_node_is_pinned_and_evicted_by_its_name(live_page):
    chosen = node(5)
    opened = live_page([("cache", cache())], [chosen])
    page, sent = opened.page, list[tuple[str, Any]]()

    def note(request: Request) -> None:
        if request.post_data:
            sent.append((request.url.rpartition("/")[2], request.post_data_json))

    page.on("request", note)
    page.on("dialog", lambda box: box.accept())
    expect(page.get_by_role("application")).to_have_attribute("data-nodes", "1")
    page.get_by_role("application").focus()
    page.keyboard.press("ArrowRight")
    page.get_by_role("button", name="Pin for an hour").click()
    expect(page.locator("#notice")).to_contain_text("pin: ")
    page.get_by_role("button", name="Evict").click()
    expect(page.locator("#notice")).to_have_text("evict: done")
    assert sent == [
        ("pin", {"node": chosen["id"], "ttl_s": 3600}),
        ("evict", {"node": chosen["id"], "tiers": ["cpu", "redis"]}),
    ]


def test_a_node_is_moved_and_brought_to_a_device_by_its_name(live_page):
    chosen = node(5)
    opened = live_page([("cache", cache())], [chosen])
    page, sent = opened.page, list[tuple[str, Any]]()

    def note(request: Request) -> None:
        if request.post_data:
            sent.append((request.url.rpartition("/")[2], request.post_data_json))

    page.on("request", note)
    expect(page.get_by_role("application")).to_have_attribute("data-nodes", "1")
    page.get_by_role("application").focus()
    page.keyboard.press("ArrowRight")
    page.get_by_role("button", name="Move to replica 1").click()
    expect(page.locator("#notice")).to_have_text("move: done")
    page.get_by_role("button", name="Bring to replica 1").click()
    expect(page.locator("#notice")).to_have_text("prefetch: done")
    assert sent == [
        ("move", {"node": chosen["id"], "source": 0, "target": 1}),
        ("prefetch", {"node": chosen["id"], "replica": 1}),
    ]


def test_the_servers_own_events_are_shown_and_a_manager_that_is_lost_is_named(start, open_page):
    control = FakeControl(tree={"nodes": [node(1)], "hidden": 0})
    opened = open_page(start(behind=backend(FakeReplicas(answering("Yes.", reason="hit")), control)).url)
    page, state = opened.page, opened.page.locator("#live-state")
    expect(state).to_have_text("Live.")
    expect(page.locator("#tier-cpu .text")).to_contain_text("20 B of 100 B")
    expect(page.get_by_role("application")).to_have_attribute("data-nodes", "1")
    usages = opened.usages()
    opened.ask("Where is the red ball?")
    line = page.locator("#routes li").first
    expect(line).to_contain_text("hit")
    kv = usages[0]["kv_cache"]
    spans = line.locator(".sources span").all()
    shown = {one.get_attribute("class"): int(one.get_attribute("data-tokens") or -1) for one in spans}
    assert shown == {source: kv[source] for source in ("device", "cpu", "redis", "recomputed")}
    control.error = RuntimeError("gone")
    expect(state).to_contain_text("manager is away")
    expect(page.locator("#tier-cpu .text")).to_contain_text("20 B of 100 B")
    opened.ask("And now?")
    expect(opened.answer().locator(".words")).to_have_text("Yes.")
    control.error = None
    expect(state).to_have_text("Live.")


def test_who_may_not_watch_reads_why_and_watches_with_a_key(start, open_page):
    opened = open_page(start(api_keys={"key-a": "alice"}).url)
    state = opened.page.locator("#live-state")
    expect(state).to_contain_text("key")
    opened.page.get_by_label("API key").fill("key-a")
    opened.page.get_by_label("API key").press("Enter")
    expect(state).to_have_text("Live.")
    expect(opened.page.locator("#tier-cpu .text")).to_contain_text("10 B")
