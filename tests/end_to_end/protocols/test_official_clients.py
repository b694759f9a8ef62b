"""A real server under the official clients of OpenAI and Anthropic: one conversation, three protocols, one cache."""

from __future__ import annotations

from typing import Any

import anthropic
import openai
import pytest

from load_tests.harness.server import RunningServer

pytestmark = pytest.mark.server

FACTS = " ".join(f"Ben's note {number} says that Anna lives in Oslo." for number in range(30))
QUESTION = "Where does Anna live?"
SALT = {"cache_salt": "protocols"}
HERE = {"X-CrossKV-Replica": "0"}


def chat(server: RunningServer) -> tuple[str, Any]:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    messages: Any = [{"role": "system", "content": FACTS}, {"role": "user", "content": QUESTION}]
    answer = client.chat.completions.create(
        model="demo", messages=messages, max_tokens=12, temperature=0, extra_body=SALT, extra_headers=HERE
    )
    return answer.choices[0].message.content or "", answer.usage.kv_cache  # type: ignore[union-attr]


def response(server: RunningServer) -> tuple[str, Any]:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    with client.responses.stream(
        model="demo", instructions=FACTS, input=QUESTION, max_output_tokens=12, temperature=0, extra_body=SALT,
        extra_headers=HERE,
    ) as stream:  # fmt: skip
        answer = next(event.response for event in stream if event.type == "response.completed")
    return answer.output_text, answer.usage.kv_cache  # type: ignore[union-attr]


def message(server: RunningServer) -> tuple[str, Any]:
    client = anthropic.Anthropic(base_url=server.url, api_key="none")
    with client.messages.stream(
        model="demo", system=FACTS, messages=[{"role": "user", "content": QUESTION}], max_tokens=12,
        extra_body={**SALT, "temperature": 0}, extra_headers=HERE,
    ) as stream:  # fmt: skip
        answer = stream.get_final_message()
        text = "".join(block.text for block in answer.content if block.type == "text")
    return text, answer.usage


def test_one_conversation_has_one_answer_and_one_cache_in_every_protocol(server: RunningServer) -> None:
    server.clear("device", "cpu", "redis")
    said, cold = chat(server)
    server.wait_until_idle()
    assert said
    assert cold["recomputed"] > 256
    answered, warm = response(server)
    assert answered == said
    assert warm["device"] > 256
    text, usage = message(server)
    assert text == said
    assert usage.cache_read_input_tokens > 256
