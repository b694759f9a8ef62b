"""The picture of a trie of more than 100,000 nodes: what is sent, looked at and drawn stays small, by counts."""

from __future__ import annotations

from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
from fake_backend import FakeReplicas, backend
from large_trie import LargeTrieControl
from opened_page import OpenedPage
from playwright.sync_api import expect

from kvmanager.views.tree import LEAST_COUNTED, MOST_COUNTED, MOST_LOOKED_AT

SENT = 1_000
"""Nodes that the page asks for."""
LEVELS = 17
NEAREST = 4
"""Pixels between two nodes of a level."""

NOTE_FRAMES = """() => {
  const canvas = document.querySelector('#trie');
  window.frames_ = [];
  const note = () => window.frames_.push([Number(canvas.dataset.visited), Number(canvas.dataset.drawn)]);
  new MutationObserver(note).observe(canvas, {attributes: true, attributeFilter: ['data-visited']});
}"""


@pytest.fixture(scope="module")
def large() -> LargeTrieControl:
    return LargeTrieControl()


@pytest.fixture
def opened(start: Any, open_page: Any, large: LargeTrieControl) -> OpenedPage:
    replicas = FakeReplicas(known_ranks=(0, 1))
    page: OpenedPage = open_page(start(behind=backend(replicas, large)).url)
    expect(page.page.get_by_role("application")).to_have_attribute("data-nodes", str(SENT))
    page.page.evaluate(NOTE_FRAMES)
    return page


def frames(opened: OpenedPage) -> list[list[int]]:
    """Of each frame since then: nodes looked at, and drawn. There is another one first."""
    page = opened.page
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")
    found: list[list[int]] = page.evaluate("() => window.frames_.splice(0)")
    assert found
    return found


def test_all_of_it_is_there_and_the_manager_sends_and_touches_a_bounded_part(opened, large):
    assert len(large.trie_behind.nodes) > 100_000
    page, trie = opened.page, opened.page.get_by_role("application")
    expect(trie).to_have_attribute(
        "aria-label", f"Trie of cached prefixes: {SENT} nodes shown, {hidden(large)} beginnings hidden"
    )
    trie.focus()
    page.keyboard.press("ArrowRight")
    for _ in range(3):
        with page.expect_response(lambda one: "root=" in one.url) as answered:
            page.keyboard.press("Enter")
        (root,) = parse_qs(urlsplit(answered.value.url).query)["root"]
        expect(trie).to_have_attribute("data-first", root)  # an arrow goes from there in what is shown by then
        page.keyboard.press("ArrowRight")
    page.get_by_role("button", name="Whole trie").click()
    expect(page.get_by_role("button", name="Whole trie")).to_be_hidden()
    assert max(large.answered) == SENT
    assert max(large.views.looked_at) <= MOST_LOOKED_AT + MOST_COUNTED + (LEAST_COUNTED + 1) * SENT


def hidden(large: LargeTrieControl) -> int:
    tree = large.views.tree(None, None, 16, SENT)
    assert tree is not None
    return tree.hidden_roots


def test_frames_look_at_what_they_show_while_the_reader_zooms_pans_and_clicks(opened):
    page, trie = opened.page, opened.page.get_by_role("application")
    trie.focus()  # which scrolls it into view
    box = trie.bounding_box()
    rows = box["height"] // NEAREST + 12  # with the margins around the canvas
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    seen: list[list[int]] = []
    page.keyboard.press("0")
    seen += frames(opened)
    page.mouse.move(x, y)
    for delta in [-200] * 12 + [150] * 20 + [-300] * 8:
        page.mouse.wheel(0, delta)
        seen += frames(opened)
    page.mouse.down()
    for step in range(30):
        page.mouse.move(x + 5 * step, y - 9 * step)
    page.mouse.up()
    seen += frames(opened)
    for key in ["ArrowRight", "ArrowRight", *["ArrowDown"] * 40, "Shift+ArrowUp", "-", "-", "+"]:
        page.keyboard.press(key)
        seen += frames(opened)
    for at in range(20, int(box["height"]) - 20, 12):
        page.mouse.click(box["x"] + 22, box["y"] + at)
        seen += frames(opened)
    page.keyboard.press("ArrowRight")
    expect(page.locator("#trie-node")).to_contain_text("tokens")
    visited, drawn = (max(column) for column in zip(*seen, strict=True))
    assert 0 < drawn <= min(SENT, LEVELS * rows)
    assert visited <= 3 * min(SENT, LEVELS * rows)  # the others are jumped over by bisection
    whole = seen[0]
    assert whole[1] < 0.7 * SENT, "what would be drawn over each other is folded"


def test_many_moves_between_two_frames_are_one_frame(opened):
    drawn = opened.page.evaluate(
        """() => new Promise(done => requestAnimationFrame(() => {
            const canvas = document.querySelector('#trie');
            window.frames_.splice(0);
            for (let moves = 0; moves < 500; moves += 1)
              canvas.dispatchEvent(new KeyboardEvent('keydown', {key: moves % 2 ? '+' : '-'}));
            requestAnimationFrame(() => requestAnimationFrame(() => done(window.frames_.length)));
        }))"""
    )
    assert 1 <= drawn <= 3


def test_zooming_in_unfolds_what_was_folded_and_fit_shows_all_of_it_again(opened):
    page, trie = opened.page, opened.page.get_by_role("application")
    trie.focus()
    page.keyboard.press("0")
    folded = frames(opened)[-1]
    for _ in range(10):
        page.keyboard.press("+")
    close = frames(opened)[-1]
    assert close[1] < folded[1]
    rows = page.evaluate(
        """async () => { const {layout, visible} = await import('./page/trie_layout.js');
            const {nodes} = await (await fetch('api/v1/kv/trie?depth=16&most=1000')).json();
            const placed = layout(nodes);
            const all = {x: 20, y: 20, across: 1, scale: 1};
            const tall = visible(placed.roots, all, 2000, placed.height + 40).seen.length;
            const flat = visible(placed.roots, {...all, scale: 200 / placed.height}, 2000, 240);
            const parents = flat.seen.every(([node, parent]) => (parent?.id ?? null) === node.parent);
            return [nodes.length, tall, flat.seen.length, parents]; }"""
    )
    sent, tall, flat, parents = rows
    assert tall == sent, "with room for all of them, all are shown"
    assert flat < 0.7 * sent
    assert parents
    page.keyboard.press("0")
    assert frames(opened)[-1] == folded
