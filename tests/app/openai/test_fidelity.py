"""Exact or tolerant: who decides, what is refused, and under which names a prompt goes to the replicas."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import ingress_server
import openai
import pytest
from fake_backend import FakeControl, FakeReplicas, backend
from ingress_server import CHAT, COMPLETION, CONTEXT, FINGERPRINT, MODEL, SECRET, Server, serve
from vllm.config import VllmConfig

from app.gate.kv_cache_field import KVCacheField
from app.openai.prompt_keys import FidelityRule, PromptKeys
from configs.settings import SettingsError, load_settings
from deployments.protocol.wire import GenerateRequest
from kvmanager.segments import keys

CHAT_PATH, COMPLETION_PATH = "/v1/chat/completions", "/v1/completions"
KEYS = {"key-a": "alice", "key-b": "bob", "key-c": "carol"}
TOKENS = list(range(70))
TOLERANT = {"kv_cache": {"fidelity": "tolerant"}}


@dataclass
class RememberingControl(FakeControl):
    """Remembers the block hashes of every order."""

    named: list[list[bytes]] = field(default_factory=list)

    async def _order(self, kind: str, hashes: Sequence[bytes], *rest: Any) -> dict[str, Any]:
        self.named.append(list(hashes))
        return await super()._order(kind, hashes, *rest)


@dataclass
class Tenants:
    """A server whose deployment is exact, whose alice is tolerant and whose bob is exact."""

    server: Server
    replicas: FakeReplicas
    control: RememberingControl

    def client(self, key: str) -> httpx.Client:
        return self.server.http(headers={"Authorization": f"Bearer {key}"})

    def sent(self, key: str, body: dict[str, Any], path: str = COMPLETION_PATH) -> GenerateRequest:
        """What reached the replicas of a body."""
        with self.client(key) as client:
            answer = client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        return self.replicas.requests[-1]


@pytest.fixture(scope="module")
def tenants(vllm_config: VllmConfig) -> Iterator[Tenants]:
    replicas, control = FakeReplicas(), RememberingControl()
    own = {"alice": {"fidelity": "tolerant"}, "bob": {"fidelity": "exact"}}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            ingress_server,
            "settings_with",
            lambda **http: load_settings({"max_model_len": CONTEXT, "http": http, "tenants": own}),
        )
        with serve(vllm_config, backend(replicas, control), api_keys=KEYS) as server:
            yield Tenants(server, replicas, control)


def salt(tenant: str, fidelity: keys.Fidelity, user_salt: str = "") -> str:
    return keys.cache_salt(SECRET, FINGERPRINT, f"{tenant}\0{user_salt}", fidelity)


def prompt(body: dict[str, Any] | None = None) -> dict[str, Any]:
    return {"model": MODEL, "prompt": TOKENS, "max_tokens": 3, **(body or {})}


@pytest.mark.parametrize(
    ("key", "asked", "expected"),
    [
        ("key-a", None, "tolerant"),
        ("key-b", None, "exact"),
        ("key-c", None, "exact"),
        ("key-a", "exact", "exact"),
        ("key-b", "tolerant", "tolerant"),
        ("key-c", "tolerant", "tolerant"),
    ],
)
def test_the_request_decides_before_the_tenant_and_the_tenant_before_the_deployment(
    tenants: Tenants, key: str, asked: str | None, expected: keys.Fidelity
) -> None:
    request = tenants.sent(key, prompt({"kv_cache": {"fidelity": asked}} if asked else None))

    assert request.fidelity == expected
    assert request.cache_salt == salt(KEYS[key], expected)


def test_a_deployment_may_be_tolerant() -> None:
    rule = FidelityRule("tolerant", {"bob": "exact"})
    assert [rule.of(tenant) for tenant in ("", "alice", "bob")] == ["tolerant", "tolerant", "exact"]


def test_a_tolerant_prompt_has_names_of_its_own_and_carries_those_of_its_exact_twin(tenants: Tenants) -> None:
    exact = tenants.sent("key-c", prompt({"cache_salt": "mine"}))
    tolerant = tenants.sent("key-c", prompt({"cache_salt": "mine", **TOLERANT}))

    assert len(tolerant.block_hashes) == 2
    assert not set(tolerant.block_hashes) & set(exact.block_hashes)
    assert tolerant.exact_block_hashes == exact.block_hashes
    assert exact.exact_block_hashes == [], "an exact prompt knows no other names"
    assert tolerant.block_hashes == keys.block_hashes(TOKENS, 32, salt("carol", "tolerant", "mine"))


def test_another_tenants_exact_prompts_are_not_a_tolerant_prompts_twins(tenants: Tenants) -> None:
    alices = tenants.sent("key-a", prompt({**TOLERANT, "cache_salt": "same"}))
    bobs = tenants.sent("key-b", prompt({"cache_salt": "same"}))

    assert not set(alices.exact_block_hashes) & set(bobs.block_hashes)


@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETION_PATH])
def test_chats_and_completions_take_the_field_and_no_engine_sees_it(tenants: Tenants, path: str) -> None:
    body = {**(CHAT if path == CHAT_PATH else COMPLETION), **TOLERANT}
    request = tenants.sent("key-c", body, path)

    assert request.fidelity == "tolerant"
    assert "tolerant" not in repr(request.sampling_params)
    assert request.sampling_params.extra_args is None


def test_the_official_client_sends_it_as_extra_body_and_usage_says_what_was_used(tenants: Tenants) -> None:
    client = openai.OpenAI(base_url=f"{tenants.server.url}/v1", api_key="key-c", max_retries=0)
    answers = [client.chat.completions.create(**CHAT, extra_body=extra) for extra in (TOLERANT, None)]  # type: ignore[call-overload]
    chunks = list(
        client.chat.completions.create(  # type: ignore[call-overload]
            **CHAT, extra_body=TOLERANT, stream=True, stream_options={"include_usage": True}
        )
    )

    assert [answer.usage.kv_cache["fidelity"] for answer in answers] == ["tolerant", "exact"]
    assert chunks[-1].usage.kv_cache["fidelity"] == "tolerant"


BAD = [
    ("tolerant", "kv_cache"),
    (5, "kv_cache"),
    (True, "kv_cache"),
    (["tolerant"], "kv_cache"),
    ({"fidelity": "lossy"}, "kv_cache.fidelity"),
    ({"fidelity": "Tolerant"}, "kv_cache.fidelity"),
    ({"fidelity": ""}, "kv_cache.fidelity"),
    ({"fidelity": 1}, "kv_cache.fidelity"),
    ({"fidelity": ["tolerant"]}, "kv_cache.fidelity"),
    ({"fidelity": {"a": 1}}, "kv_cache.fidelity"),
    ({"fidelity": "tolerant", "level": 3}, "kv_cache.level"),
    ({"": 1}, "kv_cache."),
    ({"x" * 1000: 1}, "kv_cache." + "x" * 64),
]


@pytest.mark.parametrize(("value", "param"), BAD, ids=[str(number) for number in range(len(BAD))])
@pytest.mark.parametrize("path", [CHAT_PATH, COMPLETION_PATH, "/api/v1/kv/pin"])
def test_what_is_no_fidelity_is_a_400_that_names_it(tenants: Tenants, path: str, value: Any, param: str) -> None:
    body = {CHAT_PATH: CHAT, COMPLETION_PATH: COMPLETION}.get(path, {"tokens": TOKENS})
    before = len(tenants.replicas.requests)
    with tenants.client("key-c") as client:
        answer = client.post(
            path, content=json.dumps({**body, "kv_cache": value}), headers={"content-type": "application/json"}
        )

    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert "kv_cache" in error["message"]
    assert len(tenants.replicas.requests) == before


@pytest.mark.parametrize("value", [None, {}, {"fidelity": None}])
def test_a_field_that_says_nothing_is_as_none(tenants: Tenants, value: Any) -> None:
    assert tenants.sent("key-a", prompt({"kv_cache": value})).fidelity == "tolerant"
    assert tenants.sent("key-b", prompt({"kv_cache": value})).fidelity == "exact"


def test_the_control_api_speaks_of_the_prompt_that_its_requests_would_be(tenants: Tenants) -> None:
    listed = ",".join(map(str, TOKENS))
    with tenants.client("key-c") as client:
        for more in ({}, {"fidelity": "tolerant"}):
            client.get("/api/v1/kv/lookup", params={"tokens": listed, **more}).raise_for_status()
        for path, rest in (
            ("pin", {}),
            ("unpin", {}),
            ("prefetch", {"replica": 0}),
            ("move", {"source": 0, "target": 1}),
        ):
            client.post(f"/api/v1/kv/{path}", json={"tokens": TOKENS, **rest, **TOLERANT}).raise_for_status()
    with tenants.client("key-a") as client:
        client.get("/api/v1/kv/lookup", params={"tokens": listed}).raise_for_status()
        wrong = client.get("/api/v1/kv/lookup", params={"tokens": listed, "fidelity": "lossy"})
    exact, tolerant = (keys.block_hashes(TOKENS, 32, salt("carol", name)) for name in ("exact", "tolerant"))

    assert tenants.control.looked_up == [
        exact,
        tolerant,
        keys.block_hashes(TOKENS, 32, salt("alice", "tolerant")),
    ], "what nobody says is the tenant's own"
    ingress_server.wait_until(lambda: len(tenants.control.named) == 4)
    assert tenants.control.named == [tolerant] * 4
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "fidelity")


def test_a_tenant_that_nobody_has_a_key_for_is_refused_at_start() -> None:
    with pytest.raises(SettingsError, match=r"tenants: 'eve' is no tenant"):
        load_settings({"http": {"api_keys": KEYS}, "tenants": {"eve": {"fidelity": "tolerant"}}})
    with pytest.raises(SettingsError, match=r"tenants: .*http\.api_keys"):
        load_settings({"tenants": {"eve": {"fidelity": "tolerant"}}})
    with pytest.raises(SettingsError, match=r"kv\.fidelity"):
        load_settings({"kv": {"fidelity": "lossy"}})


def test_the_salt_of_each_fidelity_is_another() -> None:
    derive = PromptKeys(SECRET, FINGERPRINT, 32)
    exact, tolerant = (derive.salt("alice", "x", KVCacheField(name)) for name in ("exact", "tolerant"))
    assert derive.salt("alice", "x") == derive.exact_salt("alice", "x") == exact != tolerant
