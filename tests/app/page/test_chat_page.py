"""The chat in a browser: a whole conversation, its figures, and what can go wrong."""

from __future__ import annotations

import re

from fake_backend import FakeReplicas, fail_with, speak_for_ever
from ingress_server import wait_until
from opened_page import PHONE
from page_scripts import HOSTILE, answering
from playwright.sync_api import expect


def test_a_whole_conversation_with_the_figures_of_the_api(start, open_page):
    server = start(FakeReplicas(answering("The **red** ball is here.", replica="1", reason="hit")))
    opened = open_page(server.url)
    usages = opened.usages()
    opened.ask("Where is the red ball?")
    answer = opened.answer()
    expect(answer.locator(".words")).to_have_text("The red ball is here.")
    expect(answer.locator("strong")).to_have_text("red")
    opened.ask("And now?")
    expect(opened.page.locator(".turn")).to_have_count(4)
    usage = usages[-1]
    kv = usage["kv_cache"]
    assert opened.shown_tokens() == {source: kv[source] for source in ("device", "cpu", "redis", "recomputed")}
    assert sum(opened.shown_tokens().values()) == usage["prompt_tokens"]
    text = answer.locator(".figures").inner_text()
    assert "hit" in text
    assert "first token" in text
    assert f"8 of {usage['prompt_tokens']} prompt tokens" in opened.answer().locator(".figures").inner_text()
    last = server.replicas.requests[-1]
    assert last.sampling_params.temperature == 0


def test_blended_tokens_are_shown_as_part_of_those_that_were_loaded(start, open_page):
    server = start(FakeReplicas(answering("Yes.", replica="0", blended=5)))
    opened = open_page(server.url)
    opened.page.locator("#settings summary").click()
    opened.page.get_by_label("Fidelity").select_option("blended")
    opened.ask("Where is the red ball, and whose is it?")
    expect(opened.answer().locator("[data-source=blended]")).to_have_text("blended 5")
    expect(opened.answer().locator(".blended-row .blended")).to_have_attribute("data-tokens", "5")
    expect(opened.answer().locator(".sources")).to_have_attribute("aria-label", re.compile("of these 5 blended"))


def test_spaces_in_a_heading_do_not_hold_up_the_page(start, open_page):
    """A pattern that tries all ways to part them would: 3,000 are seconds, twice as many eight times that."""
    opened = open_page(start(FakeReplicas(answering("## a" + " " * 6_000 + "b ##\n\nThe end."))).url)
    opened.ask("Make room.")
    expect(opened.answer().locator(".words")).to_contain_text("The end.")
    expect(opened.answer().locator("h5")).to_contain_text("b")
    expect(opened.answer().locator("h5")).not_to_contain_text("#")


def test_what_a_model_says_never_becomes_markup(start, open_page):
    opened = open_page(start(FakeReplicas(answering(HOSTILE))).url)
    opened.ask("<script>window.caught = 6</script><b>hi</b>")
    words = opened.answer().locator(".words")
    expect(words).to_contain_text("<script>window.caught = 1</script>")
    expect(words).to_contain_text("<svg onload=window.caught=5>")
    tags = words.evaluate("box => [...new Set([...box.querySelectorAll('*')].map(one => one.tagName))].sort()")
    assert not {"SCRIPT", "IMG", "SVG", "IFRAME", "STYLE", "B", "I"} & set(tags), tags
    links = words.locator("a")
    expect(links).to_have_count(1)
    expect(links).to_have_attribute("href", "https://example.com/a?b=1")
    expect(links).to_have_attribute("rel", "noopener noreferrer nofollow")
    assert opened.page.locator(".turn.user .words *").count() == 0
    opened.page.reload()
    expect(opened.answer().locator(".words")).to_contain_text("window.caught = 1")
    assert opened.page.evaluate("window.caught") is None


def test_the_policy_stops_inline_code_and_markup_from_text(start, open_page):
    opened = open_page(start().url, may_complain_of=("Content Security Policy", "TrustedHTML", "Trusted"))
    blocked = opened.page.evaluate(
        """() => new Promise(done => {
            document.addEventListener('securitypolicyviolation', event => done(event.effectiveDirective));
            const script = document.createElement('script');
            try { script.text = 'window.caught = 1'; } catch (error) { done('trusted types'); }
            document.body.append(script);
        })"""
    )
    assert blocked in ("trusted types", "script-src-elem", "require-trusted-types-for")
    assert opened.page.evaluate("window.caught") is None
    style = opened.page.evaluate(
        """() => { const box = document.createElement('p'); box.setAttribute('style', 'color: rgb(1, 2, 3)');
                   document.body.append(box); return getComputedStyle(box).color; }"""
    )
    assert style != "rgb(1, 2, 3)"
    refused = opened.page.evaluate(
        """() => { try { document.body.innerHTML = '<p>'; return false; } catch (error) { return true; } }"""
    )
    assert refused


def test_an_error_is_shown_in_the_servers_words_and_can_be_retried(start, open_page):
    opened = open_page(start(max_body_bytes=2048).url)
    opened.ask("word " * 1000)
    expect(opened.answer().get_by_role("alert")).to_contain_text("2048")
    opened.page.get_by_role("button", name="Edit").click()
    opened.page.get_by_label("Edit the message").fill("short")
    opened.page.get_by_role("button", name="Send again").click()
    expect(opened.answer().locator(".words")).to_have_text("one two three")
    expect(opened.page.locator(".turn")).to_have_count(2)


def test_an_error_within_a_stream_keeps_what_was_said(start, open_page):
    opened = open_page(start(FakeReplicas(fail_with(ValueError("broken"), after_words=1))).url)
    opened.ask("Hello")
    expect(opened.answer().get_by_role("alert")).not_to_be_empty()
    expect(opened.answer().locator(".words")).to_have_text("word")


def test_an_answer_is_stopped_and_its_request_ends(start, open_page):
    server = start(FakeReplicas(speak_for_ever))
    opened = open_page(server.url)
    opened.page.get_by_label("Message", exact=True).fill("Talk")
    opened.page.get_by_role("button", name="Send").click()
    expect(opened.page.locator("[aria-busy] .words")).to_contain_text("word word")
    opened.page.keyboard.press("Escape")
    expect(opened.answer()).to_contain_text("Stopped.")
    expect(opened.page.get_by_role("button", name="Stop")).to_be_hidden()
    wait_until(lambda: server.replicas.aborted)


def test_conversations_outlive_the_tab_and_the_key_does_not(start, open_page):
    opened = open_page(start(api_keys={"secret-key-of-alice": "alice"}).url)
    page = opened.page
    expect(page.locator("#server-state")).to_have_text("The server wants an API key.")
    page.get_by_label("API key").fill("secret-key-of-alice")
    page.get_by_label("API key").press("Tab")
    expect(page.locator("#server-state")).to_contain_text("demo")
    opened.ask("first question")
    page.get_by_role("button", name="New", exact=True).click()
    expect(page.locator(".turn")).to_have_count(0)
    opened.ask("second question")
    kept = page.evaluate("JSON.stringify(localStorage) + document.cookie")
    assert "second question" in kept
    assert "secret-key" not in kept
    other = page.context.new_page()
    other.goto(f"{opened.url}/")
    expect(other.locator("#server-state")).to_have_text("The server wants an API key.")
    other.get_by_label("Conversation", exact=True).select_option(label="first question")
    expect(other.locator(".turn.user")).to_have_text("Youfirst questionEdit")
    other.get_by_role("button", name="Delete").click()
    expect(other.get_by_label("Conversation", exact=True).locator("option")).to_have_count(1)


def test_what_lies_broken_in_the_browser_is_left_out(start, open_page):
    server = start()
    opened = open_page(server.url)
    for kept in ("{", "[1, null]", '[{"id": "a", "title": "b", "documents": [], "turns": [{"role": "system"}]}]'):
        opened.page.evaluate("kept => localStorage.setItem('crosskv.chats', kept)", kept)
        opened.page.reload()
        expect(opened.page.get_by_label("Conversation", exact=True).locator("option")).to_have_count(1)
    opened.ask("still works")


def test_documents_go_before_the_conversation(start, open_page):
    server = start()
    opened = open_page(server.url)
    sent: list[dict] = []
    opened.page.on("request", lambda one: sent.append(one.post_data_json) if "chat/completions" in one.url else None)
    opened.page.locator("#document-file").set_input_files(
        {"name": "a.txt", "mimeType": "text/plain", "buffer": b"Anna is here."}
    )
    expect(opened.page.locator("#documents li")).to_have_count(1)
    pasted = "Bob is there. " * 100
    opened.page.locator("#prompt").evaluate(
        """(prompt, text) => { const clip = new DataTransfer(); clip.setData('text/plain', text);
            const how = {clipboardData: clip, bubbles: true, cancelable: true};
            prompt.dispatchEvent(new ClipboardEvent('paste', how)); }""",
        pasted,
    )
    opened.page.locator("body").evaluate(
        """body => { const drop = new DataTransfer(); drop.items.add(new File(['Carl.'], 'c.md'));
            body.dispatchEvent(new DragEvent('drop', {dataTransfer: drop, bubbles: true, cancelable: true})); }"""
    )
    expect(opened.page.locator("#documents li")).to_have_count(3)
    opened.page.get_by_role("button", name="Remove pasted text").click()
    opened.ask("Who?")
    assert sent[0]["messages"] == [
        {"role": "system", "content": "Anna is here.\nCarl."},
        {"role": "user", "content": "Who?"},
    ]
    assert sent[0]["stream_options"] == {"include_usage": True}
    assert "kv_cache" not in sent[0]


def test_a_narrow_screen_needs_no_scrolling_aside(start, open_page):
    opened = open_page(start(FakeReplicas(answering(HOSTILE + "x" * 300))).url, viewport=PHONE)
    opened.ask("Hello")
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
    expect(opened.page.locator("#live")).to_be_hidden()
    toggle = opened.page.get_by_role("button", name="Cache")
    toggle.click()
    expect(toggle).to_have_attribute("aria-pressed", "true")
    expect(opened.page.locator("#live")).to_be_visible()
    expect(opened.page.locator("#chat")).to_be_hidden()
    assert opened.page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]


def test_dark_follows_the_system_until_the_reader_chooses(start, open_page):
    opened = open_page(start().url, color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    assert opened.page.evaluate(ground) == "rgb(18, 21, 27)"
    opened.page.get_by_role("button", name="Theme").click()
    assert opened.page.evaluate(ground) == "rgb(255, 255, 255)"
    opened.page.reload()
    assert opened.page.evaluate(ground) == "rgb(255, 255, 255)"


def test_the_keyboard_alone_is_enough(start, open_page):
    server = start()
    page = open_page(server.url).page
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    page.keyboard.type("line one")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("line two")
    page.keyboard.press("Enter")
    expect(page.locator(".turn.assistant .figures")).to_have_count(1)
    expect(page.locator(".turn.user .words")).to_have_text("line one\nline two")
    page.get_by_role("button", name="Edit").press("Enter")
    page.keyboard.type(" more")
    page.keyboard.press("Enter")
    expect(page.locator(".turn.user .words")).to_contain_text("more")
    expect(page.locator(".turn.assistant .figures")).to_have_count(1)
    assert len(server.replicas.requests) == 2


def test_a_step_of_the_tour_says_what_it_has_shown(start, open_page):
    opened = open_page(start(FakeReplicas(answering("Anna lives in Oslo.", reason="hit"))).url)
    usages, steps = opened.usages(), opened.page.locator("#tour-steps li")
    steps.nth(0).get_by_role("button").click()
    expect(steps.nth(0)).to_have_class("done")
    total = usages[0]["prompt_tokens"]
    said = re.compile(rf": first token after \d+ ms, {800 // total}% reused")
    expect(steps.nth(0).locator(".result")).to_have_text(said)
    steps.nth(2).get_by_role("button").click()
    expect(opened.page.locator("#notice")).to_have_text("There is no other replica to ask.")
    expect(steps.nth(2)).not_to_have_class("done")
