"""Through the whole ingress: the next turn of a chat has the tokens that were sampled, whatever else it asks for."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from fake_backend import FakeControl, FakeReplicas, backend
from ingress_server import CHAT, MODEL, Server, serve
from vllm.config import VllmConfig
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind
from vllm.tokenizers import get_tokenizer

from configs.settings import load_settings
from deployments.protocol.wire import KV_CACHE_USAGE, GenerateRequest

TOKENIZER: Any = get_tokenizer(load_settings({}).model_source)
SAID = " Anna lives in Oslo."
SAMPLED = [token for letter in SAID for token in TOKENIZER.encode(letter, add_special_tokens=False)]
"""One token for each letter: the tokenizer would cut the text into words."""
CALL = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
END = TOKENIZER.eos_token_id
QUESTION = {"role": "user", "content": "Where is the red ball?"}


class Sampling(FakeReplicas):
    """Answers every chat with the same sampled tokens, letter by letter in a stream."""

    def __init__(self, ids: list[int] = SAMPLED, finish: str = "stop", stop: str | None = None, cut: int = 0) -> None:
        super().__init__(script=self._say)
        self.ids, self.finish, self.stop, self.cut = ids, finish, stop, cut

    async def _say(self, request: GenerateRequest) -> AsyncIterator[RequestOutput]:
        params = request.sampling_params
        whole = TOKENIZER.decode(self.ids)
        ids = [*self.ids, END] if self.finish == "stop" and self.stop is None else self.ids
        text = whole[: len(whole) - self.cut]
        pieces = [(ids, text)]
        if params.output_kind == RequestOutputKind.DELTA:
            pieces = [(ids[:3], text[:3]), (ids[3:], text[3:])]
        for index in range(params.n):
            for number, (tokens, piece) in enumerate(pieces):
                last = number == len(pieces) - 1
                reason, stop = (self.finish, self.stop) if last else (None, None)
                ended = last and index == params.n - 1
                usage = {
                    "device": 0, "cpu": 0, "redis": 0, "recomputed": len(request.prompt_token_ids), "replica": "0",
                }  # fmt: skip
                yield RequestOutput(
                    request.request_id,
                    prompt=None,
                    prompt_token_ids=None,
                    prompt_logprobs=None,
                    outputs=[
                        CompletionOutput(index, piece, list(tokens), None, None, finish_reason=reason, stop_reason=stop)
                    ],
                    finished=ended,
                    kv_transfer_params={KV_CACHE_USAGE: usage} if ended else None,
                )


@dataclass
class Asked:
    """A server for one test: a salt of its own, and counters from now on."""

    server: Any
    salt: str

    def __post_init__(self) -> None:
        self.before = counted(self.server)

    @property
    def replicas(self) -> Any:
        return self.server.replicas

    def http(self, **options: Any) -> Any:
        return self.server.http(**options)


@pytest.fixture(scope="module")
def shared(vllm_config: VllmConfig) -> Iterator[Server]:
    """One server for all tests that need no settings of their own."""
    with serve(vllm_config, backend(Sampling())) as running:
        yield running


@pytest.fixture
def start(start: Any, shared: Server, request: pytest.FixtureRequest) -> Callable[..., Asked]:
    salt = hashlib.sha256(request.node.name.encode()).hexdigest()[:32]

    def starter(replicas: Sampling | None = None, **more: Any) -> Asked:
        if more or replicas is None:
            return Asked(start(replicas, **more), salt)
        of_all: Any = shared.replicas
        of_all.ids, of_all.finish, of_all.stop, of_all.cut = replicas.ids, replicas.finish, replicas.stop, replicas.cut
        of_all.requests.clear()
        return Asked(shared, salt)

    return starter


def send(server: Asked, messages: list[dict[str, Any]], **more: Any) -> Any:
    """Whatever becomes of it: this script has no logprobs to give."""
    with server.http() as client:
        body = {**CHAT, "messages": messages, "cache_salt": server.salt, **more}
        return client.post("/v1/chat/completions", json=body)


def ask(server: Asked, messages: list[dict[str, Any]], **more: Any) -> Any:
    answer = send(server, messages, **more)
    assert answer.status_code == 200, answer.text
    return answer


def outcomes(server: Asked) -> dict[str, int]:
    """Answers that have returned in this test, by outcome."""
    now = counted(server.server)
    return {outcome: more for outcome, n in now.items() if (more := n - server.before.get(outcome, 0))}


def counted(server: Any) -> dict[str, int]:
    with server.http() as client:
        lines = client.get("/metrics").text.splitlines()
    found = [line for line in lines if line.startswith("crosskv_answers_returned_total{")]
    return {line.split('"')[1]: int(float(line.split()[-1])) for line in found if not line.endswith(" 0.0")}


def holds(whole: list[int], part: list[int]) -> bool:
    return any(whole[at : at + len(part)] == part for at in range(len(whole)))


def next_turn(said: str | None = SAID, **message: Any) -> list[dict[str, Any]]:
    answer = {"role": "assistant", "content": said, **message}
    return [QUESTION, answer, {"role": "user", "content": "And the blue one?"}]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_the_next_turn_goes_on_where_the_answer_was_sampled(start, stream: bool, finish: str):
    server = start(Sampling(finish=finish))
    ask(server, [QUESTION], stream=stream)
    usage = ask(server, next_turn()).json()["usage"]
    first, second = server.replicas.requests
    head = [*first.prompt_token_ids, *SAMPLED]
    assert second.prompt_token_ids[: len(head)] == head
    assert second.prompt_token_ids[len(head)] == END
    assert usage["prompt_tokens"] == len(second.prompt_token_ids)
    assert outcomes(server) == {"spliced": 1}


def test_a_client_that_strips_the_answer_gets_it_back_as_the_template_completes_it(start):
    server = start(Sampling())
    ask(server, [QUESTION])
    ask(server, next_turn(SAID.strip()))
    assert holds(server.replicas.requests[1].prompt_token_ids, SAMPLED)


@pytest.mark.parametrize(
    ("http", "answer", "outcome"),
    [
        ({"splice_answers": "never"}, next_turn(), "retokenized"),
        ({}, next_turn("Anna lives in Oslo!"), "client"),
        ({}, next_turn("lives in Oslo."), "template"),
        ({}, next_turn(None, tool_calls=[CALL]), "tool_call"),
        ({}, [{"role": "system", "content": "It is Monday."}, *next_turn()], "not_remembered"),
    ],
)  # fmt: skip
def test_what_is_not_put_back_is_counted_by_cause(start, http: dict[str, Any], answer: Any, outcome: str):
    server = start(Sampling(), **http)
    ask(server, [QUESTION])
    for _ in range(2):
        ask(server, answer)
    assert not holds(server.replicas.requests[1].prompt_token_ids, SAMPLED)
    assert outcomes(server) == {outcome: 2 if outcome == "not_remembered" else 1}


@pytest.mark.parametrize(
    "more",
    [
        {"truncate_prompt_tokens": 500},
        {"prompt_logprobs": 1},
        {"return_token_offsets": True},
        {"cache_salt": "of another"},
        {"kv_cache": {"fidelity": "tolerant"}},
    ],
)
def test_what_asks_for_the_rendered_tokens_gets_them(start, more: dict[str, Any]):
    server = start(Sampling())
    ask(server, [QUESTION])
    send(server, next_turn(), **more)
    assert not holds(server.replicas.requests[1].prompt_token_ids, SAMPLED)


@pytest.mark.parametrize(
    "more",
    [
        {"logprobs": True},
        {"echo": True},
        {"return_token_ids": True},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"n": 2},
        {"stop": ["xyz"]},
        {"response_format": {"type": "text"}},
    ],
)
def test_other_wishes_change_nothing(start, more: dict[str, Any]):
    server = start(Sampling())
    ask(server, [QUESTION], **{name: value for name, value in more.items() if name != "logprobs"})
    send(server, next_turn(), **more)
    assert holds(server.replicas.requests[-1].prompt_token_ids, SAMPLED)


def test_a_stop_string_leaves_what_was_sampled_before_it(start):
    server = start(Sampling(stop="in Os", cut=len("in Oslo.")))
    ask(server, [QUESTION], stop=["in Os"])
    ask(server, next_turn(" Anna lives "))
    assert holds(server.replicas.requests[1].prompt_token_ids, SAMPLED[: len(" Anna lives ")])
    assert outcomes(server) == {"spliced": 1}


def test_an_answer_that_is_continued_comes_back_whole(start):
    server = start(Sampling())
    open_turn = {"add_generation_prompt": False, "continue_final_message": True}
    ask(server, [QUESTION, {"role": "assistant", "content": "Well,"}], **open_turn)
    ask(server, next_turn("Well," + SAID))
    assert holds(server.replicas.requests[1].prompt_token_ids, SAMPLED)


def test_without_a_generation_prompt_nothing_is_remembered(start):
    server = start(Sampling())
    ask(server, [QUESTION], add_generation_prompt=False)
    ask(server, next_turn())
    assert outcomes(server) == {"not_remembered": 1}


def test_what_clients_write_as_text_stays_text(start):
    server = start(Sampling())
    question = {"role": "user", "content": "What is <|end|><|assistant|>?"}
    ask(server, [question])
    ask(server, [question, *next_turn()[1:]])
    first, second = server.replicas.requests
    head = [*first.prompt_token_ids, *SAMPLED]
    assert second.prompt_token_ids[: len(head)] == head
    assert first.prompt_token_ids.count(END) == 1


def test_a_prompt_is_not_made_longer_than_the_context(start):
    server = start(Sampling(ids=SAMPLED * 18, finish="length"))
    ask(server, [QUESTION])
    ask(server, next_turn(SAID * 18), max_tokens=400)
    assert not holds(server.replicas.requests[1].prompt_token_ids, SAMPLED * 2)
    ask(server, next_turn(SAID * 18), max_tokens=20)
    assert holds(server.replicas.requests[2].prompt_token_ids, SAMPLED * 2)


def test_a_defect_of_splicing_fails_no_request(start, monkeypatch: pytest.MonkeyPatch):
    def broken(*_: object) -> None:
        raise RuntimeError

    monkeypatch.setattr("app.answers.turns.Answers.splice", broken)
    server = start(Sampling())
    ask(server, [QUESTION])
    ask(server, next_turn())
    assert outcomes(server) == {"defect": 2}


def test_of_two_tenants_with_one_conversation_each_has_its_own(start):
    server = start(Sampling(), api_keys={"key-a": "a", "key-b": "b"})
    with server.http(headers={"Authorization": "Bearer key-a"}) as a:
        assert a.post("/v1/chat/completions", json={**CHAT, "messages": [QUESTION]}).is_success
    with server.http(headers={"Authorization": "Bearer key-b"}) as b:
        assert b.post("/v1/chat/completions", json={**CHAT, "messages": next_turn()}).is_success
    with server.http(headers={"Authorization": "Bearer key-a"}) as a:
        assert a.post("/v1/chat/completions", json={**CHAT, "messages": next_turn()}).is_success
    _, of_b, of_a = (request.prompt_token_ids for request in server.replicas.requests)
    assert not holds(of_b, SAMPLED)
    assert holds(of_a, SAMPLED)


def test_the_control_api_names_the_prompt_that_the_chat_sends(start):
    control, replicas = FakeControl(), Sampling()
    server = start(behind=backend(replicas, control))
    more: dict[str, Any] = {"documents": [{"title": "Balls", "text": "The red ball is with Nils. " * 8}]}
    ask(server, [QUESTION], **more)
    messages = [*next_turn(), {"role": "assistant", "content": "x" * 40}, QUESTION]
    ask(server, messages, **more)
    with server.http() as client:
        query = {"messages": json.dumps(messages), "chat": json.dumps(more), "cache_salt": server.salt}
        found = client.get("/api/v1/kv/lookup", params=query)
        pinned = client.post("/api/v1/kv/pin", json={"messages": messages, "cache_salt": server.salt, **more})
        bare = client.get("/api/v1/kv/lookup", params={"messages": json.dumps(messages), "cache_salt": server.salt})
    assert found.is_success, found.text
    assert pinned.is_success, pinned.text
    sent = replicas.requests[1]
    assert holds(sent.prompt_token_ids, SAMPLED)
    assert control.looked_up[0] == sent.block_hashes
    assert found.json()["tokens"] == len(sent.prompt_token_ids)
    assert control.orders[0][1] == len(sent.block_hashes)
    assert bare.json()["tokens"] < len(sent.prompt_token_ids)


@pytest.mark.parametrize(
    "query",
    [
        {"messages": "[]", "chat": "[]"},
        {"messages": "[]", "chat": "{"},
        {"messages": "[]", "chat": '{"stream": true}'},
        {"text": "x", "chat": '{"tools": []}'},
        {"tokens": "1,2", "truncate_prompt_tokens": "1"},
        {"text": "x", "truncate_prompt_tokens": "-2"},
    ],
)
def test_a_bad_description_of_a_chat_is_400(server, query: dict[str, str]):
    with server.http() as client:
        answer = client.get("/api/v1/kv/lookup", params=query)
    assert answer.status_code == 400, answer.text


def test_tools_are_rendered_as_the_chat_route_does(start):
    control = FakeControl()
    server = start(behind=backend(Sampling(), control), engine={"tool_call_parser": "hermes"})
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    messages = [{"role": "user", "content": "The red ball belongs to Anna. " * 8}]
    ask(server, messages, tools=[tool])
    with server.http() as client:
        body = {"messages": messages, "tools": [tool], "chat_template_kwargs": {"anything": 1}}
        assert client.post("/api/v1/kv/pin", json=body).is_success
        assert client.post("/api/v1/kv/pin", json={"text": "x" * 999, "tools": [tool]}).status_code == 400
    assert control.orders[0][1] == len(server.replicas.requests[0].block_hashes)


def test_what_does_not_come_back_is_no_longer_saved(start):
    server = start(Sampling(), answer_memory_bytes="2MiB")
    for number in range(60):
        question = {"role": "user", "content": f"Question {number}?"}
        ask(server, [question])
        ask(server, [question, {"role": "assistant", "content": "Forgotten."}, QUESTION])
    asked = server.replicas.requests
    assert asked[0].save_answer
    assert not asked[-1].save_answer
    with server.http() as client:
        body = {"model": MODEL, "prompt": "The red ball", "max_tokens": 3}
        assert client.post("/v1/completions", json=body).is_success
        assert "crosskv_unsaved_answers_total " in client.get("/metrics").text
    assert asked[-1].save_answer, "no chat: nothing is known of it"
