"""Every text of every legal history is in the prompt, on all three APIs; histories are drawn."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from bodies import CHATS, MESSAGES, RESPONSES
from ingress_server import Server

HISTORIES = 25
MOST_TURNS = 5
LETTERS = "bcdfghjklmnpqrstvwz"

Drawn = tuple[dict[str, Any], list[str]]
"""A body, and the words of it that the model is to read."""


class Words:
    """Words that stand nowhere else."""

    def __init__(self, rng: Random) -> None:
        self.rng = rng
        self.used: list[str] = []

    def new(self) -> str:
        word = "".join(self.rng.choice(LETTERS) for _ in range(6))
        self.used.append(word)
        return word

    def content(self, kind: str) -> Any:
        """A text, or parts of it of this type."""
        if self.rng.random() < 0.4:
            return self.new()
        return [{"type": kind, "text": self.new()} for _ in range(self.rng.randint(1, 3))]


def a_chat(rng: Random) -> Drawn:
    words, messages = Words(rng), list[dict[str, Any]]()
    if rng.random() < 0.5:
        messages.append({"role": rng.choice(["system", "developer"]), "content": words.content("text")})
    for number in range(rng.randint(1, MOST_TURNS)):
        messages.append({"role": "user", "content": words.content("text")})
        if rng.random() < 0.4:
            call = {"id": f"c{number}", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            messages.append({"role": "assistant", "content": words.content("text"), "tool_calls": [call]})
            messages.append({"role": "tool", "tool_call_id": f"c{number}", "content": words.content("text")})
        messages.append({"role": "assistant", "content": words.content("text")})
    messages.append({"role": "user", "content": words.content("text")})
    return {"model": "demo", "messages": messages, "max_tokens": 1}, words.used


def a_response(rng: Random) -> Drawn:
    words, items = Words(rng), list[dict[str, Any]]()
    body: dict[str, Any] = {"model": "demo", "input": items, "max_output_tokens": 1}
    if rng.random() < 0.5:
        body["instructions"] = words.new()
    typed = {"type": "message"} if rng.random() < 0.5 else {}
    for number in range(rng.randint(1, MOST_TURNS)):
        items.append({**typed, "role": "user", "content": words.content("input_text")})
        if rng.random() < 0.4:
            items.append({"type": "function_call", "call_id": f"c{number}", "name": "f", "arguments": "{}"})
            output = words.content("input_text")
            items.append({"type": "function_call_output", "call_id": f"c{number}", "output": output})
        items.append({**typed, "role": "assistant", "content": words.content("output_text")})
    items.append({**typed, "role": "user", "content": words.content("input_text")})
    return body, words.used


def a_message(rng: Random) -> Drawn:
    words, messages = Words(rng), list[dict[str, Any]]()
    body: dict[str, Any] = {"model": "demo", "messages": messages, "max_tokens": 1}
    if rng.random() < 0.5:
        body["system"] = words.content("text")
    for number in range(rng.randint(1, MOST_TURNS)):
        messages.append({"role": "user", "content": words.content("text")})
        if rng.random() < 0.4:
            call = {"type": "tool_use", "id": f"c{number}", "name": "f", "input": {}}
            messages.append({"role": "assistant", "content": [{"type": "text", "text": words.new()}, call]})
            result = {"type": "tool_result", "tool_use_id": f"c{number}", "content": words.content("text")}
            document = {"type": "document", "source": {"type": "text", "media_type": "text/plain", "data": words.new()}}
            messages.append({"role": "user", "content": [result, document]})
        messages.append({"role": "assistant", "content": words.content("text")})
    messages.append({"role": "user", "content": words.content("text")})
    return body, words.used


@pytest.mark.parametrize(
    ("path", "draw"),
    [(CHATS, a_chat), (RESPONSES, a_response), (MESSAGES, a_message)],
    ids=["chat", "response", "message"],
)
def test_every_text_of_a_history_is_in_the_prompt(server: Server, path: str, draw: Callable[[Random], Drawn]) -> None:
    answered = 0
    with server.http() as client:
        for seed in range(HISTORIES):
            body, words = draw(Random(seed))
            answer = client.post(path, json=body)
            if answer.status_code == 400 and "tokens" in answer.text:
                continue  # longer than the test's model takes
            assert answer.status_code == 200, (seed, answer.text)
            answered += 1
            tokens = list(server.replicas.requests[-1].prompt_token_ids)
            prompt = client.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
            places = [prompt.find(word) for word in words]
            lost = [word for word, place in zip(words, places, strict=True) if place < 0]
            assert not lost, (seed, body, prompt)
            if path != RESPONSES:  # whose instructions come first, wherever they were drawn
                assert places == sorted(places), (seed, "in the order of the history")
    assert answered > HISTORIES // 2
