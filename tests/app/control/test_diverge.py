"""POST /api/v1/kv/diverge, and prompts that are named as their requests would send them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from fake_backend import FakeControl, FakeReplicas, backend
from ingress_server import CHAT

LONG = "The red ball belongs to Anna. The blue ball belongs to Ben. " * 8
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]


def chat(head: str) -> dict[str, Any]:
    return {"messages": [{"role": "system", "content": f"{head} {LONG}"}, {"role": "user", "content": "Where is it?"}]}


def ask(client: Any, first: dict[str, Any], second: dict[str, Any]) -> Any:
    answer = client.post("/api/v1/kv/diverge", json={"first": first, "second": second})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_date_in_front_costs_the_whole_prefix_and_behind_costs_little(start):
    server = start(behind=backend(FakeReplicas(), FakeControl()))
    with server.http() as client:
        in_front = ask(client, chat("Monday"), chat("Friday"))
        behind = ask(client, {"text": f"{LONG}Monday"}, {"text": f"{LONG}Friday"})
        tokens = client.post("/tokenize", json={"model": "demo", "prompt": LONG}).json()["count"]
    assert in_front["shared_tokens"] < in_front["block_size_tokens"]
    assert (in_front["block"], in_front["reusable_tokens"]) == (0, 0)
    least = min(in_front[side]["tokens"] for side in ("first", "second"))
    assert in_front["lost_tokens"] == least // 32 * 32 >= 96
    assert in_front["first"]["text"] != in_front["second"]["text"]
    assert abs(behind["shared_tokens"] - tokens) <= 2
    assert behind["reusable_tokens"] == behind["shared_tokens"] // 32 * 32
    assert behind["lost_tokens"] in (0, 32)
    assert "Ben" in behind["shared_text"]


def test_what_keeps_prompts_apart_is_named_where_the_same_text_goes_on(start):
    server = start(behind=backend(FakeReplicas(), FakeControl()))
    with server.http() as client:
        for head, cause in (("Today is Friday.", "date"), ("Session 1f0e7a52.", "id"), ("Dear Benedict,", "other")):
            other = {"date": "Today is Monday.", "id": "Session 99aa0b1c.", "other": "Dear Anna,"}[cause]
            assert ask(client, chat(head), chat(other))["cause"] == cause
        line = "x-anthropic-billing-header: cc_version=2.1.37; cch="
        texts = [{"text": f"{line}{value};\n{LONG}"} for value in ("fa690", "00b1c")]
        assert ask(client, *texts)["cause"] == "billing"
        assert ask(client, chat(f"{line}fa690;\n"), chat(f"{line}00b1c;\n"))["same"], "left out of chats"
        turns = [{"text": f"{more}<|system|> {LONG}"} for more in ("", "<|system|> You help.<|end|>")]
        assert ask(client, *turns)["cause"] == "template"
        assert ask(client, chat("Monday"), chat("Monday"))["cause"] is None
        assert ask(client, {"text": LONG}, {"tokens": list(range(100, 300))})["cause"] is None
        assert ask(client, chat("Monday"), {**chat("Friday"), "cache_salt": "x"})["cause"] is None


def test_how_often_a_date_in_front_has_cost_the_prefix_is_counted_for_its_tenant_only(start):
    keys = {"key-a": "alice", "key-b": "bob", "key-o": {"tenant": "ops", "admin": True}}
    alice, bob = ({"authorization": f"Bearer {key}"} for key in ("key-a", "key-b"))
    server = start(behind=backend(FakeReplicas(), FakeControl()), api_keys=keys)
    text = "The red ball belongs to Anna. " * 40
    with server.http() as client:
        for headers, days in ((alice, ("Monday", "Friday", "Sunday")), (bob, ("Sunday",))):
            for day in days:
                body = {**CHAT, "messages": [{"role": "user", "content": f"{day}! {text}"}]}
                assert client.post("/v1/chat/completions", json=body, headers=headers).status_code == 200
        body = {"first": {"text": "a"}, "second": {"text": "b"}}
        told = [client.post("/api/v1/kv/diverge", json=body, headers=who).json()["lately"] for who in (alice, bob)]
        scraped = client.get("/metrics", headers={"authorization": "Bearer key-o"}).text
    assert [(one["prompts"], one["parted"]["date"], sum(one["parted"].values())) for one in told] == [
        (3, 2, 2),
        (1, 0, 0),
    ]
    assert 'crosskv_parted_prompts_total{cause="date"} 2.0' in scraped
    assert 'crosskv_parted_prompts_total{cause="defect"} 0.0' in scraped


def test_either_side_says_what_the_cache_has_of_it(start):
    control = FakeControl()
    server = start(behind=backend(FakeReplicas(), control))
    first, second = list(range(100)), [*range(70), *range(200, 240)]
    with server.http() as client:
        found = ask(client, {"tokens": first}, {"tokens": second})
        looked = client.get("/api/v1/kv/lookup", params={"tokens": ",".join(map(str, second))}).json()
    assert (found["shared_tokens"], found["block"], found["reusable_tokens"], found["same"]) == (70, 2, 64, False)
    assert found["second"]["tokens_by_tier"] == looked["tokens_by_tier"]
    assert control.looked_up[1] == control.looked_up[2]
    assert found["first"]["tokens"] == 100


def test_prompts_of_two_namespaces_share_nothing_whatever_their_tokens(start):
    server = start(behind=backend(FakeReplicas(), FakeControl()))
    prompt = {"tokens": list(range(100))}
    with server.http() as client:
        for other in ({"cache_salt": "x"}, {"kv_cache": {"fidelity": "tolerant"}}):
            found = ask(client, prompt, {**prompt, **other})
            assert (found["same"], found["same_namespace"], found["reusable_tokens"]) == (True, False, 0)
            assert found["lost_tokens"] == 96
        same = ask(client, prompt, prompt)
        assert (same["same_namespace"], same["reusable_tokens"], same["lost_tokens"]) == (True, 96, 0)


def test_token_ids_that_the_model_does_not_have_are_no_500(start):
    server = start(behind=backend(FakeReplicas(), FakeControl()))
    with server.http() as client:
        found = ask(client, {"tokens": [999_999_999] * 40}, {"tokens": [1] * 40})
    assert (found["shared_tokens"], found["first"]["text"]) == (0, "")


@pytest.mark.parametrize(
    "body",
    [
        {},
        {"first": {"text": "a"}},
        {"first": {"text": "a"}, "second": {}},
        {"first": {"text": "a"}, "second": {"text": "b", "tokens": [1]}},
        {"first": {"text": "a"}, "second": {"text": "x " * 5000}},
        {"first": {"text": "a"}, "second": {"tokens": [1] * 600}},
        {"first": {"text": "a"}, "second": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}},
        {"first": {"text": "a"}, "second": {"messages": [{}] * 5000}},
        {"first": {"text": "a"}, "second": {**chat("Monday"), "tools": TOOLS * 1025, "tool_choice": "none"}},
        {"first": {"text": "a"}, "second": {"text": "b", "cache_salt": "s" * 200}},
        {"first": {"text": "a"}, "second": {"text": "b", "node": "ab"}},
        {"first": {"text": "a"}, "second": {"text": "b"}, "third": {"text": "c"}},
        {"first": "a", "second": "b"},
        [],
    ],
    ids=lambda body: str(body)[:60],
)
def test_a_bad_comparison_is_400_and_asks_nobody(start, body):
    control = FakeControl()
    server = start(behind=backend(FakeReplicas(), control))
    with server.http() as client:
        answer = client.post("/api/v1/kv/diverge", json=body)
    assert (answer.status_code, answer.json()["error"]["type"]) == (400, "invalid_request_error"), answer.text
    assert control.looked_up == []


def test_a_manager_that_is_away_is_503(start):
    server = start(behind=backend(FakeReplicas(), FakeControl(error=RuntimeError("secret"))))
    with server.http() as client:
        answer = client.post("/api/v1/kv/diverge", json={"first": {"text": LONG}, "second": {"text": LONG}})
    assert answer.status_code == 503
    assert "secret" not in answer.text


@pytest.mark.parametrize(
    "more",
    [
        {"tools": TOOLS, "tool_choice": "none"},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"truncate_prompt_tokens": 64},
        {"documents": [{"title": "Balls", "text": "The red ball is Anna's."}]},
    ],
    ids=lambda more: next(iter(more)),
)
def test_a_prompt_is_named_as_its_request_sends_it(start, more):
    control, replicas = FakeControl(), FakeReplicas()
    server = start(behind=backend(replicas, control))
    named = {**chat("Monday"), **more}
    with server.http() as client:
        assert client.post("/v1/chat/completions", json={**CHAT, **named}).status_code == 200
        truncated = {"truncate_prompt_tokens": more.get("truncate_prompt_tokens")}
        fields = {name: value for name, value in more.items() if name not in truncated}
        params = {"messages": json.dumps(named["messages"]), **({"chat": json.dumps(fields)} if fields else {})}
        params |= {name: value for name, value in truncated.items() if value is not None}
        assert client.get("/api/v1/kv/lookup", params=params).status_code == 200
        assert ask(client, named, named)["same"]
        assert client.post("/api/v1/kv/pin", json=named).status_code == 200
    sent = replicas.requests[0].block_hashes
    assert control.looked_up == [sent, sent, sent]
    assert control.orders[0][1] == len(sent) > 0
