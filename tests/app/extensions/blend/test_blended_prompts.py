"""Blended prompts: who may ask for what, which chunks go to the replicas, and what usage and metrics say of them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import ingress_server
import openai
import pytest
from fake_backend import FakeControl, FakeReplicas, backend, say
from ingress_server import CONTEXT, FINGERPRINT, MODEL, SECRET, Server, serve
from vllm.config import VllmConfig
from vllm.outputs import RequestOutput

from app.metrics.usage import RequestKVUsage, prompt_usage
from configs.blending import DEFAULT_RECOMPUTE_RATIO
from configs.settings import load_settings
from deployments.protocol.wire import KV_CACHE_USAGE, GenerateRequest
from kvmanager.extensions.blend.chunks import blend_variant
from kvmanager.segments import keys

CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"
KEYS = {"key-a": "alice", "key-b": "bob", "key-c": "carol"}
BLENDED = {"kv_cache": {"fidelity": "blended"}}
END, USER, DOC, BLOCK = 2, 4, 6, 32
FIRST, SECOND, SHORT = ([DOC, *range(base, base + tokens)] for base, tokens in ((100, 79), (300, 69), (500, 20)))
HEAD, TAIL = [1, 3, 50, 51, 52], [END, USER, 60, 61]
PROMPT = [*HEAD, *FIRST, *SHORT, *SECOND, *TAIL]
TEXTS = [
    " ".join(f"{name} lives in {city}." for city in ("Paris", "Oslo", "Lima", "Rome") for _ in range(5))
    for name in ("Anna", "Ben", "Carmen")
]
"""Documents that the demo tokenizer cuts word by word, so that each is some 100 tokens."""


async def blend(request: GenerateRequest) -> AsyncIterator[RequestOutput]:
    """One output, whose usage says that everything but a tenth was loaded, half of it blended."""
    output = say(request, [10], " one", finished=True)
    tokens = len(request.prompt_token_ids)
    loaded = tokens - tokens // 10
    usage = {"device": 0, "cpu": loaded, "redis": 0, "recomputed": tokens // 10, "replica": "0"}
    if request.fidelity == "blended":
        usage["blended"] = loaded // 2
    output.kv_transfer_params = {KV_CACHE_USAGE: usage}
    yield output


@dataclass
class Tenants:
    """A server whose alice is blended."""

    server: Server
    replicas: FakeReplicas
    control: FakeControl

    def client(self, key: str = "key-c") -> httpx.Client:
        return self.server.http(headers={"Authorization": f"Bearer {key}"})

    def post(self, path: str, body: dict[str, Any], key: str = "key-c") -> httpx.Response:
        with self.client(key) as client:
            text = json.dumps({**({"model": MODEL, "max_tokens": 3} if path.startswith("/v1/") else {}), **body})
            return client.post(path, content=text, headers={"content-type": "application/json"})

    def sent(self, body: dict[str, Any], key: str = "key-c", path: str = COMPLETION_PATH) -> GenerateRequest:
        """What reached the replicas of a body."""
        answer = self.post(path, {"prompt": PROMPT, **body} if path == COMPLETION_PATH else body, key)
        assert answer.status_code == 200, answer.text
        return self.replicas.requests[-1]

    def counted(self, name: str) -> float:
        with self.client("watcher") as client:
            lines = client.get("/metrics").text.splitlines()
        return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + " "))


@pytest.fixture(scope="module")
def tenants(vllm_config: VllmConfig) -> Iterator[Tenants]:
    replicas, control = FakeReplicas(script=blend), FakeControl()
    sections = {
        "tenants": {"alice": {"fidelity": "blended"}},
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ingress_server,
            "settings_with",
            lambda **http: load_settings({"max_model_len": CONTEXT, "http": http, **sections}),
        )
        with serve(vllm_config, backend(replicas, control), api_keys=KEYS, metrics_key="watcher") as server:
            yield Tenants(server, replicas, control)


def salt(
    tenant: str, fidelity: keys.Fidelity = "exact", user_salt: str = "", ratio: float = DEFAULT_RECOMPUTE_RATIO
) -> str:
    ratios = [ratio] if fidelity == "blended" else []
    return keys.cache_salt(
        SECRET, FINGERPRINT, f"{tenant}\0{user_salt}", fidelity, *(blend_variant(one) for one in ratios)
    )


def test_a_blended_prompt_brings_its_chunks_under_the_names_that_exact_prompts_have(tenants: Tenants) -> None:
    request = tenants.sent({**BLENDED, "cache_salt": "mine"})

    assert request.fidelity == "blended"
    assert request.cache_salt == salt("carol", "blended", "mine")
    assert request.exact_block_hashes == keys.block_hashes(PROMPT, BLOCK, salt("carol", "exact", "mine"))
    assert "blend" in request.extras
    assert request.extras["blend"].chunk_salt == salt("carol", "exact", "mine")
    assert [(chunk.start_token, chunk.tokens) for chunk in request.extras["blend"].chunks] == [(5, 80), (106, 70)]
    assert [chunk.block_hashes for chunk in request.extras["blend"].chunks] == [
        keys.block_hashes(document, BLOCK, request.extras["blend"].chunk_salt) for document in (FIRST, SECOND)
    ]

    alone = tenants.sent({"prompt": FIRST, "cache_salt": "mine"})
    assert (alone.fidelity, alone.extras.get("blend")) == ("exact", None)
    assert alone.block_hashes == request.extras["blend"].chunks[0].block_hashes, "the exact prompt of the chunk alone"


def test_a_document_has_the_same_names_at_another_place_and_other_ones_for_another_tenant(tenants: Tenants) -> None:
    here, there = (tenants.sent({**BLENDED, "prompt": [*HEAD, *order, *TAIL]}).extras.get("blend")
                   for order in ((*FIRST, *SECOND), (*SECOND, *SHORT, *FIRST)))  # fmt: skip
    bobs = tenants.sent(BLENDED, "key-b").extras.get("blend")

    assert here is not None
    assert there is not None
    assert bobs is not None
    assert {tuple(chunk.block_hashes) for chunk in here.chunks} == {tuple(chunk.block_hashes) for chunk in there.chunks}
    assert not {name for chunk in here.chunks for name in chunk.block_hashes} & {
        name for chunk in bobs.chunks for name in chunk.block_hashes
    }


@pytest.mark.parametrize(
    "body",
    [
        {"kv_cache": {"fidelity": "exact"}},
        {"kv_cache": {"fidelity": "tolerant"}},
        {},
        {**BLENDED, "prompt_logprobs": 1},
        {**BLENDED, "prompt": "The red ball"},
        {**BLENDED, "prompt": [*HEAD, *SHORT, *TAIL]},
        {**BLENDED, "prompt": FIRST},
        {"kv_cache": {"fidelity": "blended", "chunks": []}},
        {"kv_cache": {"fidelity": "blended", "chunks": ["", "a", "nowhere " * 100]}},
    ],
)
def test_what_is_not_blended_or_has_no_chunk_brings_none(tenants: Tenants, body: dict[str, Any]) -> None:
    assert "blend" not in tenants.sent(body).extras


@pytest.mark.parametrize(
    ("key", "asked", "ratio"),
    [
        ("key-c", {"fidelity": "blended"}, 0.15),
        ("key-a", None, 0.15),
        ("key-a", {"recompute_ratio": 0.25}, 0.25),
        ("key-a", {"recompute_ratio": 0}, 0.0),
        ("key-c", {"fidelity": "blended", "recompute_ratio": 1}, 1.0),
    ],
)
def test_the_request_names_the_ratio_before_the_deployment(
    tenants: Tenants, key: str, asked: dict[str, Any] | None, ratio: float
) -> None:
    request = tenants.sent({} if asked is None else {"kv_cache": asked}, key)
    assert "blend" in request.extras
    assert request.extras["blend"].recompute_ratio == ratio
    assert isinstance(request.extras["blend"].recompute_ratio, float)
    assert request.cache_salt == salt(KEYS[key], "blended", ratio=ratio), "and its KV is named by it"


def test_documents_of_a_chat_are_chunks(tenants: Tenants) -> None:
    body = {**BLENDED, "messages": [{"role": "user", "content": "Where does Anna live?"}]}
    documents = [{"title": "", "text": text} for text in TEXTS]
    one = tenants.sent({**body, "documents": documents}, path=CHAT_PATH).extras.get("blend")
    other = tenants.sent({**body, "documents": documents[::-1]}, path=CHAT_PATH).extras.get("blend")

    assert one is not None
    assert other is not None
    assert len(one.chunks) == 3
    assert [chunk.block_hashes for chunk in one.chunks] == [chunk.block_hashes for chunk in other.chunks[::-1]]


def test_texts_that_a_request_names_are_found_in_its_prompt_and_take_the_place_of_separators(tenants: Tenants) -> None:
    content = f"Read this. {TEXTS[0]}\n{TEXTS[1]} And this."
    named = {"fidelity": "blended", "chunks": [TEXTS[1], "not there " * 50, TEXTS[0]]}
    found, absent = (
        tenants.counted(f'crosskv_prompt_chunks_total{{outcome="{one}"}}') for one in ("given", "not_found")
    )
    request = tenants.sent(
        {
            "messages": [{"role": "system", "content": content}, {"role": "user", "content": "Where?"}],
            "kv_cache": named,
        },
        path=CHAT_PATH,
    )
    assert "blend" in request.extras
    first, second = request.extras["blend"].chunks
    assert first.start_token + first.tokens <= second.start_token

    other = tenants.sent({"prompt": f"The other way: {TEXTS[1]} Then {TEXTS[0]}", "kv_cache": named})
    assert "blend" in other.extras
    assert [chunk.block_hashes for chunk in other.extras["blend"].chunks] == [second.block_hashes, first.block_hashes]
    assert tenants.counted('crosskv_prompt_chunks_total{outcome="given"}') == found + 4
    assert tenants.counted('crosskv_prompt_chunks_total{outcome="not_found"}') == absent + 2


def test_the_texts_of_a_request_with_several_prompts_are_found_in_each(tenants: Tenants) -> None:
    before = len(tenants.replicas.requests)
    prompts = [f"One: {TEXTS[0]}", f"Two, or so: {TEXTS[0]}", "None."]
    tenants.sent({"prompt": prompts, "kv_cache": {"fidelity": "blended", "chunks": [TEXTS[0]]}})
    blends = [request.extras.get("blend") for request in tenants.replicas.requests[before:]]

    assert sorted(len(blend.chunks) if blend else 0 for blend in blends) == [0, 1, 1]


BAD = [
    ({"fidelity": "blend"}, "kv_cache.fidelity"),
    ({"fidelity": "blended", "recompute_ratio": "0.5"}, "kv_cache.recompute_ratio"),
    ({"fidelity": "blended", "recompute_ratio": True}, "kv_cache.recompute_ratio"),
    ({"fidelity": "blended", "recompute_ratio": -0.1}, "kv_cache.recompute_ratio"),
    ({"fidelity": "blended", "recompute_ratio": 1.001}, "kv_cache.recompute_ratio"),
    ({"fidelity": "blended", "recompute_ratio": 10**300}, "kv_cache.recompute_ratio"),
    ({"fidelity": "blended", "recompute_ratio": [0.5]}, "kv_cache.recompute_ratio"),
    ({"fidelity": "blended", "chunks": "a text"}, "kv_cache.chunks"),
    ({"fidelity": "blended", "chunks": {"0": "a"}}, "kv_cache.chunks"),
    ({"fidelity": "blended", "chunks": [5]}, "kv_cache.chunks"),
    ({"fidelity": "blended", "chunks": ["a", None]}, "kv_cache.chunks"),
    ({"fidelity": "blended", "chunks": [["a"]]}, "kv_cache.chunks"),
    ({"fidelity": "blended", "chunks": ["a"] * 257}, "kv_cache.chunks"),
    ({"fidelity": "blended", "chunks": ["a" * 100_000] * 3}, "kv_cache.chunks"),
    ({"fidelity": "blended", "chunk": ["a"]}, "kv_cache.chunk"),
    ({"recompute_ratio": 0.5}, "kv_cache.recompute_ratio"),
    ({"chunks": ["a"]}, "kv_cache.chunks"),
    ({"fidelity": "exact", "recompute_ratio": 0.5}, "kv_cache.recompute_ratio"),
    ({"fidelity": "tolerant", "chunks": []}, "kv_cache.chunks"),
]


@pytest.mark.parametrize(("value", "param"), BAD, ids=[str(number) for number in range(len(BAD))])
@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETION_PATH, "/api/v1/kv/pin"])
def test_what_cannot_be_meant_is_a_400_that_names_it(tenants: Tenants, path: str, value: Any, param: str) -> None:
    before = len(tenants.replicas.requests)
    body: dict[str, Any] = {
        CHAT_PATH: {"messages": [{"role": "user", "content": "a"}]},
        COMPLETION_PATH: {"prompt": PROMPT},
    }.get(path, {"tokens": PROMPT})
    answer = tenants.post(path, {**body, "kv_cache": value})

    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param
    assert len(answer.json()["error"]["message"]) < 400
    assert len(tenants.replicas.requests) == before


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e400"])
def test_what_json_has_no_number_for_is_no_ratio(tenants: Tenants, number: str) -> None:
    text = f'{{"model": "{MODEL}", "prompt": "a", "kv_cache": {{"fidelity": "blended", "recompute_ratio": {number}}}}}'
    with tenants.client() as client:
        answer = client.post(COMPLETION_PATH, content=text, headers={"content-type": "application/json"})
    assert answer.status_code == 400, answer.text


def test_usage_says_what_was_blended_of_blended_prompts_only(tenants: Tenants) -> None:
    client = openai.OpenAI(base_url=f"{tenants.server.url}/v1", api_key="key-c", max_retries=0)
    counted = tenants.counted("crosskv_blended_tokens_total")
    asked: dict[str, Any] = {"model": MODEL, "prompt": PROMPT, "max_tokens": 3}
    blended = client.completions.create(**asked, extra_body=BLENDED).usage
    exact = client.completions.create(**asked).usage
    *_, last = client.completions.create(
        **asked, extra_body=BLENDED, stream=True, stream_options={"include_usage": True}
    )

    assert blended is not None
    assert exact is not None
    assert blended.prompt_tokens_details is not None
    seen = blended.kv_cache  # type: ignore[attr-defined]
    tokens = len(PROMPT)
    assert (seen["fidelity"], seen["blended"]) == ("blended", (tokens - tokens // 10) // 2)
    assert seen["device"] + seen["cpu"] + seen["redis"] + seen["recomputed"] == tokens, "blended is a part of these"
    assert blended.prompt_tokens_details.cached_tokens == tokens - tokens // 10
    assert "blended" not in exact.kv_cache  # type: ignore[attr-defined]
    assert last.usage.kv_cache == seen
    assert tenants.counted("crosskv_blended_tokens_total") == counted + 2 * seen["blended"]


@pytest.mark.parametrize(("blended", "believed"), [(0, True), (9, True), (10, False), (-1, False)])
def test_more_blended_than_was_loaded_is_not_believed(blended: int, believed: bool) -> None:
    output = RequestOutput("r", None, None, None, [], finished=True, num_cached_tokens=3)
    reported = {"device": 4, "cpu": 5, "redis": 4, "recomputed": 7, "replica": "0", "blended": blended}
    output.kv_transfer_params = {KV_CACHE_USAGE: reported}
    usage = prompt_usage(output, 20)

    assert (usage == reported) is believed
    if not believed:
        assert (usage["device"], usage["recomputed"], usage.get("blended")) == (3, 17, None)


def test_a_request_with_several_prompts_has_their_sum() -> None:
    usage = RequestKVUsage()
    usage.fidelity = "blended"
    for blended in ({"blended": 4}, {}, {"blended": 1}):
        usage.add({"device": 0, "cpu": 9, "redis": 0, "recomputed": 1, "replica": "0", **blended})  # type: ignore[typeddict-item]
    assert (usage.fields() or {})["blended"] == 5


def test_a_lookup_of_a_blended_prompt_shows_its_own_chain_and_its_chunks(tenants: Tenants) -> None:
    listed = ",".join(map(str, PROMPT))
    tenants.control.looked_up.clear()
    with tenants.client() as client:
        exact = client.get("/api/v1/kv/lookup", params={"tokens": listed}).raise_for_status().json()
        seen = (
            client.get("/api/v1/kv/lookup", params={"tokens": listed, "fidelity": "blended"}).raise_for_status().json()
        )
        whole = {"tokens": listed, "fidelity": "blended", "recompute_ratio": 1}
        client.get("/api/v1/kv/lookup", params=whole).raise_for_status()
        assert client.get("/api/v1/kv/lookup", params={**whole, "recompute_ratio": 2}).status_code == 400

    assert tenants.control.looked_up == [
        keys.block_hashes(PROMPT, BLOCK, salt("carol")),
        keys.block_hashes(PROMPT, BLOCK, salt("carol", "blended")),
        keys.block_hashes(FIRST, BLOCK, salt("carol")),
        keys.block_hashes(SECOND, BLOCK, salt("carol")),
        keys.block_hashes(PROMPT, BLOCK, salt("carol", "blended", ratio=1.0)),
        keys.block_hashes(FIRST, BLOCK, salt("carol")),
        keys.block_hashes(SECOND, BLOCK, salt("carol")),
    ]
    assert "chunks" not in exact
    assert [(chunk["start_token"], chunk["tokens"]) for chunk in seen["chunks"]] == [(5, 80), (106, 70)]
    tokens = {"device": {"0": 64, "1": 0}, "cpu": 32, "redis": 64, "redis_with_sparse": 96}
    assert seen["chunks"][0]["tokens_by_tier"] == tokens


def test_a_lookup_asks_the_manager_of_one_chunk_at_a_time(tenants: Tenants, monkeypatch: pytest.MonkeyPatch) -> None:
    answer, asking, most = tenants.control.lookup, 0, 0

    async def lookup(hashes: list[bytes], most_blocks: int | None = None) -> dict[str, Any]:
        nonlocal asking, most
        asking += 1
        most = max(most, asking)
        await asyncio.sleep(0)
        asking -= 1
        return await answer(hashes, most_blocks)

    monkeypatch.setattr(tenants.control, "lookup", lookup)
    params = {"tokens": ",".join(map(str, PROMPT)), "fidelity": "blended"}
    with tenants.client() as client:
        found = client.get("/api/v1/kv/lookup", params=params).raise_for_status().json()
    assert (len(found["chunks"]), most) == (2, 1)


def test_the_control_api_speaks_of_blended_prompts(tenants: Tenants) -> None:
    named = {"fidelity": "blended", "recompute_ratio": 0.5, "chunks": [TEXTS[0]]}
    assert tenants.post("/api/v1/kv/pin", {"tokens": PROMPT, "kv_cache": named}).status_code == 200
    with tenants.client() as client:
        wrong = client.get("/api/v1/kv/lookup", params={"tokens": "1,2", "fidelity": "blend"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "fidelity")
