"""A long prompt's hashing holds up no other request of the ingress, nor does the search for texts in a prompt."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from fake_backend import FakeReplicas, speak
from ingress_server import COMPLETION

from app.extensions.blend import requests
from app.extensions.blend.recognition import GivenTexts
from app.openai import prompt_keys
from app.openai.prompt_keys import PromptKeys
from deployments.protocol.wire import GenerateRequest

GIVEN = {"kv_cache": {"fidelity": "blended", "chunks": ["a text"]}}


@pytest.mark.parametrize(
    ("limit", "more", "on_the_loop"),
    [(10, {}, False), (10_000, {}, True), (10_000, GIVEN, False)],
    ids=["long", "short", "texts that are looked for"],
)
def test_a_long_prompt_is_hashed_off_the_loop(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, limit: int, more: dict[str, Any], on_the_loop: bool
) -> None:
    threads: dict[str, int] = {}
    hashes, find = PromptKeys.hashes, GivenTexts.find

    def noted(self: PromptKeys, token_ids: Sequence[int], salt: str, model: str | None = None) -> list[bytes]:
        threads["work"] = threading.get_ident()
        return hashes(self, token_ids, salt, model)

    def looked_for(self: GivenTexts, token_ids: list[int], most: int) -> Any:
        threads["work"] = threading.get_ident()
        return find(self, token_ids, most)

    def script(request: GenerateRequest) -> Any:
        threads["loop"] = threading.get_ident()
        return speak(request)

    monkeypatch.setattr(PromptKeys, "hashes", noted)
    monkeypatch.setattr(GivenTexts, "find", looked_for)
    monkeypatch.setattr(requests, "LONG_PROMPT_TOKENS", limit)
    monkeypatch.setattr(prompt_keys, "LONG_PROMPT_TOKENS", limit)
    replicas = FakeReplicas(script)
    server = start(replicas)
    with server.http() as client:
        body = {**COMPLETION, "prompt": list(range(100, 200)), **more}
        assert client.post("/v1/completions", json=body).status_code == 200
    assert (threads["work"] == threads["loop"]) is on_the_loop
    assert len(replicas.requests[0].block_hashes) == 3
