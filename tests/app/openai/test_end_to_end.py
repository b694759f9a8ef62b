"""The official OpenAI client, over HTTP, to vLLM's serving classes, over our engine client, to a real engine."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from engine_backend import EngineReplicas, EngineSlot
from fake_backend import backend
from ingress_server import MODEL, Server, serve, wait_until
from vllm.config import VllmConfig

STORY = "Anna lives in Oslo. Ben is a baker. The red ball belongs to Anna. " * 4
QUESTION: list[Any] = [{"role": "user", "content": STORY + "Where is the red ball?"}]
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "find", "parameters": {"type": "object", "properties": {"what": {"type": "string"}}}},
    }
]


@pytest.fixture(scope="module")
def replicas(engine_slot: EngineSlot) -> EngineReplicas:
    return engine_slot.get()


@pytest.fixture(scope="module")
def real(vllm_config: VllmConfig, replicas: EngineReplicas) -> Iterator[Server]:
    with serve(vllm_config, backend(replicas), api_keys={"key-a": "alice", "key-b": "bob"}) as server:
        yield server


@pytest.fixture
def client(real: Server) -> openai.OpenAI:
    return real.client(api_key="key-a")


def usage_of(answer: Any) -> tuple[Any, dict[str, Any]]:
    usage = answer.usage
    kv = usage.kv_cache
    assert kv["device"] + kv["cpu"] + kv["redis"] + kv["recomputed"] == usage.prompt_tokens
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - kv["recomputed"]
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    return usage, kv


def test_models(client: openai.OpenAI):
    (model,) = client.models.list().data
    assert model.id == MODEL


def test_chat_whole_and_streamed_say_the_same(client: openai.OpenAI):
    asked = {"model": MODEL, "messages": QUESTION, "max_tokens": 12, "temperature": 0}
    whole = client.chat.completions.create(**asked)
    usage, _ = usage_of(whole)
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content != ""
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    streamed, kv = usage_of(chunks[-1])
    assert (streamed.prompt_tokens, streamed.completion_tokens) == (usage.prompt_tokens, usage.completion_tokens)
    assert kv["replica"] == "0"


def test_completion_whole_and_streamed_say_the_same(client: openai.OpenAI):
    asked = {"model": MODEL, "prompt": STORY + "Anna", "max_tokens": 8, "temperature": 0}
    whole = client.completions.create(**asked)
    usage, _ = usage_of(whole)
    chunks = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == whole.choices[0].text != ""
    streamed, _ = usage_of(chunks[-1])
    assert streamed.prompt_tokens == usage.prompt_tokens


def test_a_stream_without_include_usage_has_none(client: openai.OpenAI):
    stream = client.chat.completions.create(model=MODEL, messages=QUESTION, max_tokens=3, stream=True)
    assert all(chunk.usage is None for chunk in stream)


def test_usage_tells_what_was_reused_and_a_tenant_never_reuses_anothers(real: Server, client: openai.OpenAI):
    asked = {"model": MODEL, "prompt": [7] * 200, "max_tokens": 1}
    _, first = usage_of(client.completions.create(**asked))
    _, again = usage_of(client.completions.create(**asked))
    _, salted = usage_of(client.completions.create(**asked, extra_body={"cache_salt": "mine"}))
    _, others = usage_of(real.client(api_key="key-b").completions.create(**asked))
    assert (first["device"], first["recomputed"]) == (0, 200)
    assert (again["device"], again["recomputed"]) == (192, 8)
    assert salted["device"] == 0
    assert others["device"] == 0


def test_several_prompts_add_up(client: openai.OpenAI):
    answer = client.completions.create(model=MODEL, prompt=["one", STORY, "three"], max_tokens=2)
    usage_of(answer)
    assert [choice.index for choice in answer.choices] == [0, 1, 2]


def test_n_answers(client: openai.OpenAI):
    asked = {"model": MODEL, "messages": QUESTION, "max_tokens": 4, "n": 2, "temperature": 1.0, "seed": 3}
    whole = client.chat.completions.create(**asked)
    assert [choice.index for choice in whole.choices] == [0, 1]
    usage, _ = usage_of(whole)
    assert usage.completion_tokens <= 8
    chunks = list(client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert {chunk.choices[0].index for chunk in chunks if chunk.choices} == {0, 1}
    usage_of(chunks[-1])


def test_logprobs(client: openai.OpenAI):
    asked = {"model": MODEL, "messages": QUESTION, "max_tokens": 3, "temperature": 0}
    content = client.chat.completions.create(**asked, logprobs=True, top_logprobs=4).choices[0].logprobs.content
    assert len(content) == 3
    for token in content:
        assert len(token.top_logprobs) == 4
        assert token.logprob == max(top.logprob for top in token.top_logprobs) <= 0
    streamed = client.chat.completions.create(**asked, logprobs=True, top_logprobs=4, stream=True)
    tokens = [one.token for chunk in streamed if chunk.choices[0].logprobs for one in chunk.choices[0].logprobs.content]
    assert tokens == [one.token for one in content]
    echoed = client.completions.create(model=MODEL, prompt="The red ball", max_tokens=1, logprobs=2, echo=True)
    assert echoed.choices[0].text.startswith("The red ball")
    assert echoed.choices[0].logprobs.token_logprobs[0] is None
    assert len(echoed.choices[0].logprobs.tokens) == echoed.usage.total_tokens


def test_stop_strings(client: openai.OpenAI):
    asked = {"model": MODEL, "prompt": STORY, "max_tokens": 12, "temperature": 0, "extra_body": {"ignore_eos": True}}
    free = client.completions.create(**asked).choices[0]
    stop = free.text.split()[2]
    stopped = client.completions.create(**asked, stop=[stop]).choices[0]
    assert (free.finish_reason, stopped.finish_reason) == ("length", "stop")
    assert stopped.text == free.text[: free.text.index(stop)]


def test_ignore_eos_goes_on_to_max_tokens(client: openai.OpenAI):
    answer = client.chat.completions.create(
        model=MODEL, messages=QUESTION, max_tokens=60, temperature=0, extra_body={"ignore_eos": True}
    )
    assert answer.usage.completion_tokens == 60
    assert answer.choices[0].finish_reason == "length"


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_json_schema(client: openai.OpenAI, stream: bool):
    schema = {"enum": ["Oslo", "Rome"]}  # an object's schema would leave room for white space without end
    answer: Any = client.chat.completions.create(
        model=MODEL,
        messages=QUESTION,
        max_tokens=20,
        temperature=0,
        stream=stream,
        response_format={"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}},
    )
    if stream:
        text = "".join(chunk.choices[0].delta.content or "" for chunk in answer)
    else:
        text = answer.choices[0].message.content
    assert json.loads(text) in ("Oslo", "Rome")


def test_regex_and_choice(client: openai.OpenAI):
    asked = {"model": MODEL, "prompt": STORY, "max_tokens": 20, "temperature": 0}
    made = client.completions.create(**asked, extra_body={"structured_outputs": {"regex": "[a-c]{3}-[0-9]{2}"}})
    assert re.fullmatch("[a-c]{3}-[0-9]{2}", made.choices[0].text)
    chosen = client.completions.create(**asked, extra_body={"structured_outputs": {"choice": ["yes", "no"]}})
    assert chosen.choices[0].text in ("yes", "no")


def test_tools_are_taken_in_requests_and_in_histories(client: openai.OpenAI):
    call = {"id": "call-1", "type": "function", "function": {"name": "find", "arguments": '{"what": "ball"}'}}
    history: list[Any] = [
        *QUESTION,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call-1", "content": "In Oslo."},
    ]
    for messages in (QUESTION, history):
        answer = client.chat.completions.create(
            model=MODEL, messages=messages, tools=TOOLS, tool_choice="none", max_tokens=3
        )
        assert answer.choices[0].message.content


def test_a_grammar_that_cannot_be_followed_is_400_and_harms_nobody(client: openai.OpenAI):
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError):
            client.completions.create(
                model=MODEL,
                prompt="a",
                max_tokens=5,
                stream=stream,
                extra_body={"structured_outputs": {"grammar": "root ::= root root"}},
            )
    assert client.completions.create(model=MODEL, prompt="a", max_tokens=1).choices


def test_a_client_that_leaves_frees_the_engine(client: openai.OpenAI, replicas: EngineReplicas, real: Server):
    with client.completions.create(
        model=MODEL, prompt="a", max_tokens=500, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
        (request_id,) = replicas.running
    wait_until(lambda: request_id in replicas.aborted)
    wait_until(lambda: replicas.llm.get_num_unfinished_requests() == 0)
    assert not replicas.running


def test_tokenize_and_detokenize_are_inverse(real: Server):
    with real.http(headers={"authorization": "Bearer key-a"}) as http:
        made = http.post("/tokenize", json={"prompt": "The red ball", "add_special_tokens": False}).json()
        assert made["count"] == len(made["tokens"])
        assert http.post("/detokenize", json={"tokens": made["tokens"]}).json()["prompt"].strip() == "The red ball"
