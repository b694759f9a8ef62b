"""How many log probabilities a request may ask for, and that large answers are made like small ones, on a thread."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from fake_backend import FakeReplicas
from ingress_server import CHAT, COMPLETION, MODEL, Server
from pydantic import BaseModel
from vllm.entrypoints.openai.chat_completion.serving import OpenAIServingChat
from vllm.entrypoints.openai.completion.serving import OpenAIServingCompletion
from vllm.entrypoints.openai.responses.serving import OpenAIServingResponses
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams

from app.openai import large_answers
from app.openai.large_answers import MOST_LOGPROBS, MOST_OF_A_REQUEST, bound_logprobs
from tests.app.loop.long_answers import speak_at_length

TWENTY = {"logprobs": True, "top_logprobs": 20}


def context(**more: Any) -> Any:
    return SimpleNamespace(**{"max_tokens": 1, "tokens_at_once": None, "sequences": 0, "logprobs": 0, **more})


def params(**more: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 20, **more})


def test_answers_times_tokens_times_candidates_are_counted():
    asked = context()
    bound_logprobs(asked, params(n=4, logprobs=5), 100)
    assert (asked.sequences, asked.logprobs) == (4, 4 * 20 * 6)
    bound_logprobs(asked, params(prompt_logprobs=1), 100)
    assert (asked.sequences, asked.logprobs) == (5, 4 * 20 * 6 + 100 * 2)


@pytest.mark.parametrize(
    ("asked", "prompt_tokens"),
    [
        ({"n": 128, "logprobs": 20}, 1),
        ({"max_tokens": MOST_LOGPROBS // 2 + 1, "logprobs": 1}, 1),
        ({"max_tokens": MOST_LOGPROBS // 4, "logprobs": 0, "logprob_token_ids": [1, 2, 3, 4]}, 1),
        ({"prompt_logprobs": 20}, MOST_LOGPROBS // 21 + 1),
        ({"prompt_logprobs": 0, "logprobs": 0}, MOST_LOGPROBS - 19),
    ],
    ids=str,
)
def test_more_than_the_bound_is_refused_and_names_it(asked: dict[str, Any], prompt_tokens: int):
    with pytest.raises(VLLMValidationError, match=str(MOST_LOGPROBS)):
        bound_logprobs(context(), params(**asked), prompt_tokens)


def test_prompts_of_one_request_count_together():
    asked = context()
    for _ in range(MOST_OF_A_REQUEST // MOST_LOGPROBS):
        bound_logprobs(asked, params(max_tokens=MOST_LOGPROBS, logprobs=0), 1)
    with pytest.raises(VLLMValidationError, match=str(MOST_OF_A_REQUEST)):
        bound_logprobs(asked, params(max_tokens=1, logprobs=0), 1)


def test_an_answer_whose_length_is_left_open_is_cut_to_fit():
    most = params(max_tokens=100_000, logprobs=3, n=2)
    bound_logprobs(context(max_tokens=None), most, 1)
    assert most.max_tokens == MOST_LOGPROBS // (2 * 4)
    with pytest.raises(VLLMValidationError):
        bound_logprobs(context(max_tokens=None), params(max_tokens=100_000, min_tokens=50_000, logprobs=3), 1)


def test_of_a_stream_what_one_event_holds_counts():
    asked = context(tokens_at_once=1)
    bound_logprobs(asked, params(max_tokens=100_000, n=128, logprobs=20), 1)
    assert asked.logprobs == 128 * 21
    with pytest.raises(VLLMValidationError):
        bound_logprobs(context(tokens_at_once=1000), params(max_tokens=100_000, n=2, logprobs=20), 1)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {**CHAT, **TWENTY, "n": 3, "max_tokens": 30}),
        ("/v1/completions", {**COMPLETION, "logprobs": 5, "n": 2, "max_tokens": 60}),
        ("/v1/completions", {**COMPLETION, "prompt": ["a", "b"], "prompt_logprobs": 2, "echo": True, "logprobs": 20}),
        (
            "/v1/responses",
            {
                "model": MODEL,
                "input": "Hi",
                "max_output_tokens": 40,
                "top_logprobs": 20,
                "include": ["message.output_text.logprobs"],
            },
        ),
        ("/v1/completions", {**COMPLETION, "prompt": ["a"] * 20}),
    ],
    ids=["chat", "completion", "prompts", "response", "many"],
)
def test_a_large_answer_is_made_on_a_thread_and_is_the_same(
    start: Callable[..., Server], monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
):
    threads: list[str] = []
    dump = BaseModel.model_dump_json

    def noted(answer: BaseModel, **how: Any) -> str:
        threads.append(threading.current_thread().name)
        return dump(answer, **how)

    monkeypatch.setattr(BaseModel, "model_dump_json", noted)
    server = start(FakeReplicas(script=speak_at_length))
    answers = []
    for least in (0, 10**9):
        monkeypatch.setattr(large_answers, "LARGE", least)
        monkeypatch.setattr(large_answers, "_MANY_ANSWERS", least)
        with server.http() as client:
            answer = client.post(path, json=body)
        assert answer.status_code == 200, answer.text
        answers.append(without_names(answer.json()))
    assert answers[0] == answers[1]
    assert threads[0] != threads[-1], "the loop's own made the small one"


def without_names(answer: Any) -> Any:
    """An answer without ids and times."""
    if isinstance(answer, dict):
        return {name: without_names(one) for name, one in answer.items() if name not in ("id", "created", "created_at")}
    return [without_names(one) for one in answer] if isinstance(answer, list) else answer


def test_vllm_contract_an_answer_waits_for_nothing_once_its_outputs_have_ended():
    for full in (OpenAIServingChat.chat_completion_full_generator, OpenAIServingResponses.responses_full_generator):
        source = inspect.getsource(full)
        assert source.index("in result_generator:") < source.index("created_time", source.index("in result_generator:"))
        assert "await " not in source.partition("in result_generator:")[2]
    source = inspect.getsource(OpenAIServingCompletion._create_completion)
    assert "response = self.request_output_to_completion_response(" in source
    assert "await self._get_trace_headers(" in source
