"""A conversation with sampled answers, through a real engine: what is spliced is found, and answered as plain vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
from engine_backend import EngineSlot
from fake_backend import backend
from ingress_server import MODEL, Server, serve
from vllm.config import VllmConfig

BLOCK = 32
STORY = "Anna lives in Oslo. Ben is a baker. The red ball belongs to Anna. " * 2
NO_SPECIAL_TOKENS = {str(token): -100 for token in range(7)}


class Turn(NamedTuple):
    """`messages` were sent, and made into `prompt`."""

    messages: list[dict[str, Any]]
    prompt: list[int]
    answer: list[int]
    recomputed: int


@pytest.fixture(scope="module")
def servers(engine_slot: EngineSlot, vllm_config: VllmConfig) -> Iterator[tuple[Server, Server]]:
    """Two over one engine: one splices, one does not."""
    replicas = engine_slot.get()
    with (
        serve(vllm_config, backend(replicas)) as splicing,
        serve(vllm_config, backend(replicas), splice_answers="never") as rendering,
    ):
        yield splicing, rendering


def talk(server: Server, salt: str) -> list[Turn]:
    """Four turns at temperature 1."""
    messages: list[dict[str, Any]] = []
    turns = []
    with server.http() as client:
        for number in range(4):
            messages.append({"role": "user", "content": f"{STORY if number == 0 else ''}Who is number {number}?"})
            body = {
                "model": MODEL, "messages": messages, "max_tokens": 48, "min_tokens": 48, "temperature": 1.0,
                "seed": number, "logit_bias": NO_SPECIAL_TOKENS, "cache_salt": salt, "return_token_ids": True,
            }  # fmt: skip
            answer = client.post("/v1/chat/completions", json=body).json()
            assert "choices" in answer, answer
            (choice,) = answer["choices"]
            recomputed = answer["usage"]["kv_cache"]["recomputed"]
            turns.append(Turn(list(messages), answer["prompt_token_ids"], choice["token_ids"], recomputed))
            messages.append({"role": "assistant", "content": choice["message"]["content"]})
    return turns


def lost_of(turns: list[Turn]) -> list[int]:
    """By turn after the first: computed tokens beyond the new ones."""
    return [
        after.recomputed - (len(after.prompt) - len(before.prompt) - len(before.answer))
        for before, after in pairwise(turns)
    ]


def test_with_splicing_a_turn_computes_what_is_new(servers: tuple[Server, Server]) -> None:
    splicing, rendering = servers
    spliced = talk(splicing, "with")
    for before, after in pairwise(spliced):
        sampled = [*before.prompt, *before.answer]
        assert after.prompt[: len(sampled)] == sampled
    assert max(lost_of(spliced)) <= BLOCK
    assert max(lost_of(talk(rendering, "without"))) > BLOCK


def test_a_spliced_prompt_is_answered_as_its_tokens_are(servers: tuple[Server, Server]) -> None:
    server, _ = servers
    last = talk(server, "exact")[-1]
    wish = {"model": MODEL, "max_tokens": 12, "temperature": 0, "return_token_ids": True}
    with server.http() as client:
        chat = client.post(
            "/v1/chat/completions", json={**wish, "messages": last.messages, "cache_salt": "exact"}
        ).json()
        plain = client.post("/v1/completions", json={**wish, "prompt": last.prompt, "cache_salt": "fresh"}).json()
        rendered = client.post("/tokenize", json={"model": MODEL, "messages": last.messages}).json()["tokens"]
        texts = [
            client.post("/detokenize", json={"tokens": tokens}).json()["prompt"] for tokens in (rendered, last.prompt)
        ]
    assert chat["prompt_token_ids"] == last.prompt != rendered
    assert texts[0] == texts[1]
    assert chat["usage"]["kv_cache"]["device"] > 0
    assert plain["usage"]["kv_cache"]["device"] == 0
    assert plain["choices"][0]["token_ids"] == chat["choices"][0]["token_ids"]
    assert plain["usage"]["prompt_tokens"] == chat["usage"]["prompt_tokens"] == len(last.prompt)
