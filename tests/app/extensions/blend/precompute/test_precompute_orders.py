"""Chunks that are computed by order: which ones, for whom, how many, and what a looping or foreign client gets."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import ingress_server
import pytest
from fake_backend import FakeControl, FakeReplicas, backend, say
from ingress_server import CONTEXT, FINGERPRINT, MODEL, MOST_TRIALS, SECRET, Server, serve, wait_until
from vllm.config import VllmConfig
from vllm.outputs import RequestOutput

from app.control.jobs import Jobs
from app.extensions.blend.precompute import precompute
from app.gate.errors import OverloadedError
from configs.settings import load_settings
from deployments.engine.crash_report import EngineDiedError
from deployments.protocol.wire import NOT_READ, GenerateRequest
from kvmanager.segments import keys
from load_tests.harness.patience import patience

PATH = "/api/v1/kv/fill"
KEYS = {
    "key-a": "alice", "key-b": "bob", "key-l": "limited", "key-r": {"tenant": "root", "admin": True},
    "key-m": "modest",
}  # fmt: skip
DOC, END, BLOCK = 6, 2, 32
FIRST, SECOND, SHORT = ([DOC, *range(base, base + tokens)] for base, tokens in ((100, 79), (300, 69), (500, 20)))
TEXT = " ".join(f"Anna lives in {city}." for city in ("Paris", "Oslo", "Lima", "Rome") for _ in range(6))
"""Some 120 tokens, without a separator."""


@dataclass
class Filling:
    """A server whose replicas fill chunks as the test says."""

    server: Server
    replicas: FakeReplicas
    control: FakeControl
    outcomes: list[str | Exception] = field(default_factory=list)
    """Of the next chunks; "filled" beyond them."""
    goes: bool = True

    async def script(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        assert request.precomputes
        while not self.goes:  # noqa: ASYNC110 - another thread sets it
            await asyncio.sleep(0.005)
        outcome = self.outcomes.pop(0) if self.outcomes else "filled"
        if isinstance(outcome, Exception):
            raise outcome
        output = say(request, [10], "", finished=True)
        if outcome == "filled":
            self.control.stored.add(request.block_hashes[-1])
        elif outcome == "failed":
            output.outputs[0].finish_reason = "error"
        elif outcome == "not_blended":
            output.kv_transfer_params = {NOT_READ: True}
        yield output

    def post(self, body: dict[str, Any], key: str = "key-a", path: str = PATH) -> httpx.Response:
        with self.client(key) as client:
            return client.post(path, content=json.dumps(body), headers={"content-type": "application/json"})

    def client(self, key: str = "key-a") -> httpx.Client:
        return self.server.http(headers={"Authorization": f"Bearer {key}"})

    def job(self, body: dict[str, Any], key: str = "key-a") -> dict[str, Any]:
        """The job of an order, when it has ended."""
        answer = self.post(body, key)
        assert answer.status_code == 202, answer.text
        return self.end(answer, key)

    def end(self, answer: httpx.Response, key: str = "key-a") -> dict[str, Any]:
        deadline = time.monotonic() + patience(120)
        with self.client(key) as client:
            while (job := client.get(answer.headers["location"]).json())["status"] == "running":
                assert time.monotonic() < deadline
                time.sleep(0.01)
        return dict(job)

    @property
    def sent(self) -> list[list[int]]:
        return [request.prompt_token_ids for request in self.replicas.requests]


@pytest.fixture(scope="module")
def running(vllm_config: VllmConfig) -> Iterator[Filling]:
    replicas, control = FakeReplicas(), FakeControl()
    own = {name: {"tokens_per_minute": 200} for name in ("limited", "modest")}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ingress_server,
            "settings_with",
            lambda **http: load_settings(
                {"max_model_len": CONTEXT, "http": http, **({"tenants": own} if http else {})}
            ),
        )
        with serve(vllm_config, backend(replicas, control), api_keys=KEYS) as server:
            made = Filling(server, replicas, control)
            replicas.script = made.script
            yield made


@pytest.fixture
def filling(running: Filling) -> Filling:
    running.replicas.requests.clear()
    running.outcomes.clear()
    running.control.stored.clear()
    running.goes = True
    return running


def salt(tenant: str, user_salt: str = "") -> str:
    return keys.cache_salt(SECRET, FINGERPRINT, f"{tenant}\0{user_salt}", "exact")


def test_what_is_filled_is_what_blended_prompts_bring(filling: Filling) -> None:
    texts = {"kv_cache": {"fidelity": "blended", "chunks": [TEXT]}}
    prompts = [{"prompt": [5, 6, 7, 8, *FIRST, *SECOND, END]}, {"prompt": f"Read this. {TEXT} So?", **texts}]
    filling.replicas.script = lambda request: ingress_server_speak(request)
    for prompt in prompts:
        body = {"model": MODEL, "max_tokens": 1, "cache_salt": "mine", "kv_cache": {"fidelity": "blended"}, **prompt}
        assert filling.post(body, path="/v1/completions").status_code == 200
    asked = [request.extras.get("blend") for request in filling.replicas.requests]
    wanted = [chunk.block_hashes for blend in asked if blend is not None for chunk in blend.chunks]
    assert len(wanted) == 3

    filling.replicas.script = filling.script
    filling.replicas.requests.clear()
    job = filling.job({"chunks": [FIRST, SECOND, TEXT], "cache_salt": "mine"})

    found = filling.replicas.requests
    assert [request.block_hashes for request in found] == wanted
    assert {request.cache_salt for request in found} == {salt("alice", "mine")}
    assert {(request.fidelity, request.sampling_params.max_tokens, request.tenant) for request in found} == {
        ("exact", 1, keys.tenant_tag(SECRET, "alice"))
    }
    tokens = sum(map(len, filling.sent))
    assert job == {
        "id": job["id"], "object": "crosskv.job", "kind": "fill", "status": "done", "message": None,
        "chunks": 3, "tokens": tokens, "done": 3, "filled": 3, "stored": 0, "outcome": "done",
    }  # fmt: skip


async def ingress_server_speak(request: GenerateRequest) -> AsyncIterator[RequestOutput]:
    from fake_backend import say

    yield say(request, [10], " one", finished=True)


def test_of_a_prompt_its_chunks_are_filled_and_each_once(filling: Filling) -> None:
    filling.job({"tokens": [5, 6, *FIRST, *SHORT, *SECOND, END, *FIRST]})
    assert filling.sent == [FIRST, SECOND]
    filling.replicas.requests.clear()
    filling.job({"text": f"Read this. {TEXT} So?", "kv_cache": {"chunks": [TEXT]}})
    filling.control.stored.clear()
    filling.job({"chunks": [TEXT, TEXT]})
    assert filling.sent[0] == filling.sent[1]
    assert len(filling.sent) == 2


def test_a_text_with_separators_holds_the_chunks_that_they_begin(filling: Filling) -> None:
    filling.job({"chunks": [f"<|doc|>{TEXT}<|doc|>Too short.<|doc|>And {TEXT}"]})
    assert [chunk[0] for chunk in filling.sent] == [DOC, DOC]
    filling.replicas.requests.clear()
    with filling.client() as client:
        tokenized = client.post(
            "/tokenize", json={"model": MODEL, "prompt": f"<|doc|>{TEXT}", "add_special_tokens": False}
        )
    filling.control.stored.clear()
    filling.job({"text": f"Read this.<|doc|>{TEXT}<|doc|>", "kv_cache": None})
    assert filling.sent == [tokenized.json()["tokens"]]


@pytest.mark.parametrize(
    ("body", "param", "words"),
    [
        ({}, None, "exactly one"),
        ({"chunks": []}, None, "chunks"),
        ({"chunks": [FIRST] * 257}, None, "256"),
        ({"chunks": [FIRST], "text": "a"}, "text", "give one"),
        ({"chunks": [FIRST], "documents": []}, "documents", "give one"),
        ({"chunks": [FIRST], "kv_cache": {}}, "kv_cache", "give one"),
        ({"chunks": [FIRST], "cache_salt": ""}, None, "cache_salt"),
        ({"chunks": [FIRST], "more": 1}, None, "more"),
        ({"chunks": [FIRST], "deadline_s": 0}, None, "deadline_s"),
        ({"chunks": [FIRST, SHORT]}, "chunks[1]", "at least 64 tokens"),
        ({"chunks": ["The red ball."]}, "chunks[0]", "at least 64 tokens"),
        ({"chunks": ["<|doc|>The red ball."]}, "chunks[0]", "at least 64 tokens"),
        ({"chunks": [[]]}, "chunks[0]", "at least 64 tokens"),
        ({"chunks": [[True] * 70]}, None, ""),
        ({"chunks": [[-1] * 70]}, "chunks", "vocabulary"),
        ({"chunks": [[10**9] * 70]}, "chunks", "vocabulary"),
        ({"tokens": [5, *FIRST, 10**8 + 1]}, None, ""),
        ({"chunks": [[7] * CONTEXT]}, None, "context"),
        ({"chunks": ["a" * 50_000]}, "chunks", "characters"),
        ({"text": "The red ball."}, None, "no chunk"),
        ({"tokens": FIRST}, None, "no chunk"),
        ({"chunks": [7]}, None, "chunks"),
        ([], None, ""),
    ],
    ids=lambda value: str(value)[:40],
)  # fmt: skip
def test_a_bad_order_is_a_400_in_words_and_reaches_nobody(
    filling: Filling, body: Any, param: str | None, words: str
) -> None:
    answer = filling.post(body)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert words in error["message"]
    assert param is None or error["param"] == param
    assert filling.sent == []
    assert filling.job({"chunks": [FIRST]})["outcome"] == "done", "it holds nobody's place"


def test_an_order_of_too_many_tokens_is_refused(filling: Filling, monkeypatch: pytest.MonkeyPatch) -> None:
    from app.extensions.blend.precompute import orders

    monkeypatch.setattr(orders, "MOST_TOKENS", len(FIRST) + len(SECOND) - 1)
    answer = filling.post({"chunks": [FIRST, SECOND]})
    assert (answer.status_code, "149 tokens" in answer.json()["error"]["message"]) == (400, True)
    assert filling.job({"chunks": [FIRST]})["outcome"] == "done"


def test_a_looping_client_has_one_order_at_a_time_and_keeps_nobody_else_from_one(filling: Filling) -> None:
    filling.goes = False
    first = filling.post({"chunks": [FIRST, SECOND]})
    assert first.status_code == 202
    for _ in range(3):
        refused = filling.post({"chunks": [FIRST]})
        assert refused.status_code == 429
        assert refused.headers["retry-after"]
    wait_until(lambda: len(filling.sent) == 1)
    other = filling.post({"chunks": [FIRST]}, "key-b")
    assert other.status_code == 202
    with filling.client() as client:
        shown = client.get(first.headers["location"]).json()
    assert (shown["status"], shown["done"], shown["chunks"]) == ("running", 0, 2)
    filling.goes = True
    assert filling.end(first)["done"] == 2
    assert filling.end(other, "key-b")["done"] == 1
    assert filling.job({"chunks": [FIRST]})["outcome"] == "done"


def test_its_tokens_count_in_the_callers_rate_but_for_what_was_stored_already(filling: Filling) -> None:
    whole = filling.post({"chunks": [[7] * 150, [8] * 150]}, "key-l")
    assert (whole.status_code, "300 tokens." in whole.json()["error"]["message"]) == (400, True)
    filling.control.stored |= {keys.block_hashes([7] * 150, BLOCK, salt("limited"), None)[-1]}
    filling.replicas.requests.clear()
    filling.job({"chunks": [[7] * 150]}, "key-l")
    filling.job({"chunks": [[8] * 150]}, "key-l")
    refused = filling.post({"chunks": [[9] * 150]}, "key-l")
    assert refused.status_code == 429
    assert "Rate limit reached: 200 tokens per minute" in refused.json()["error"]["message"]
    assert len(filling.sent) == 1


def test_an_order_for_which_there_is_no_room_costs_no_tokens(filling: Filling, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any) -> None:
        raise OverloadedError

    with monkeypatch.context() as patch:
        patch.setattr(Jobs, "start", full)
        assert filling.post({"chunks": [[7] * 150]}, "key-m").status_code == 429
    assert filling.job({"chunks": [[7] * 150]}, "key-m")["outcome"] == "done"


def test_only_an_administrator_names_another_tenant(filling: Filling) -> None:
    assert filling.post({"chunks": [FIRST], "tenant": "bob"}).status_code == 403
    assert filling.post({"chunks": [FIRST], "tenant": "nobody"}, "key-r").status_code == 404
    filling.job({"chunks": [FIRST], "tenant": "bob"}, "key-r")
    filling.job({"chunks": [FIRST], "tenant": "alice"})
    assert [request.cache_salt for request in filling.replicas.requests] == [salt("bob"), salt("alice")]
    assert [request.tenant for request in filling.replicas.requests] == [
        keys.tenant_tag(SECRET, tenant) for tenant in ("bob", "alice")
    ]


def test_a_job_says_what_was_not_filled_and_why(filling: Filling) -> None:
    filling.outcomes[:] = ["failed", "filled", "not_stored"]
    job = filling.job({"chunks": [[number] * 70 for number in (7, 8, 9)]})
    assert (job["status"], job["outcome"], job["done"]) == ("failed", "incomplete", 1)
    assert job["message"] == "Some chunks are not stored: 1 failed, 1 not_stored."
    filling.goes = False
    job = filling.job({"chunks": [FIRST, SECOND], "deadline_s": 0.2})
    assert (job["status"], job["outcome"]) == ("failed", "deadline")
    assert job["message"].startswith("2 chunks were not filled in time")
    filling.goes = True
    filling.outcomes[:] = [RuntimeError("secret")]
    job = filling.job({"chunks": [FIRST]})
    assert (job["status"], job["outcome"], "secret" in str(job)) == ("failed", "unavailable", False)


def test_a_chunk_that_ends_an_engine_is_tried_at_no_second_one(filling: Filling) -> None:
    async def dies(request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        raise EngineDiedError([request.request_id])
        yield

    filling.replicas.script = dies
    deadly = [11] * 70
    try:
        job = filling.job({"chunks": [deadly]})
        assert (job["outcome"], job["message"]) == ("incomplete", "Some chunks are not stored: 1 refused.")
        assert len(filling.sent) == 1
        filling.replicas.script = filling.script
        job = filling.job({"chunks": [deadly, FIRST]})
        assert (job["done"], job["message"]) == (1, "Some chunks are not stored: 1 refused.")
        assert filling.sent[1:] == [FIRST]
    finally:
        filling.replicas.script = filling.script


def test_where_replicas_do_not_blend_orders_are_refused(filling: Filling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(precompute, "BACK_OFF_S", 1.0)
    for _ in range(MOST_TRIALS):  # a machine that stands still may take all of that second
        filling.replicas.requests.clear()
        filling.control.stored.clear()
        filling.outcomes[:] = ["not_blended"]
        job = filling.job({"chunks": [FIRST, SECOND]})
        assert (job["status"], job["outcome"], len(filling.sent)) == ("failed", "not_blended", 1)
        refused = filling.post({"chunks": [FIRST]})
        if refused.status_code != 202:
            break
        filling.end(refused)
    assert (refused.status_code, "do not blend" in refused.json()["error"]["message"]) == (409, True)
    wait_until(lambda: filling.post({"chunks": [FIRST]}).status_code == 202)


def test_without_keys_only_the_servers_own_machine_may_order(start: Any) -> None:
    server = start(loopback=False)
    with server.http() as client:
        assert client.post(PATH, json={"chunks": [FIRST]}).status_code == 403
