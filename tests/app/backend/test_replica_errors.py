"""What goes wrong behind the ingress: before the first token a status, after it an event in the stream."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import openai
import pytest
import ray.exceptions
from failed_replicas import SECRET, STOPPED, check_all_is_free, leave, parts, send, through_ray
from fake_backend import FakeReplicas, fail_with, say, speak, speak_for_ever, think_for_ever
from ingress_server import CHAT, COMPLETION, reached, wait_until
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from vllm.exceptions import GenerationError, VLLMValidationError

from app.backend.replica_errors import translate
from app.openai.constraint_pool import ConstraintPool
from app.openai.constraint_worker import FITS, GrammarVerdict
from deployments.engine.crash_report import EngineDiedError
from load_tests.harness.patience import patience

ERRORS = [
    (through_ray(VLLMValidationError("top_k is wrong", parameter="top_k")), 400),
    (through_ray(ValueError(SECRET)), 500),
    (BackPressureError(5, 5), 429),
    (STOPPED, 503),
    (ray.exceptions.ActorUnavailableError("gone", b"x" * 16), 503),
    (DeploymentUnavailableError("Replica"), 503),
    (through_ray(EngineDiedError(("another request",))), 503),
    (TimeoutError(), 503),
    (through_ray(RuntimeError(SECRET)), 500),
]

TYPES = {400: "invalid_request_error", 429: "rate_limit_error"}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("error", "status"), ERRORS, ids=lambda value: type(value).__name__)
def test_before_the_first_token_it_is_a_status(start, error: Exception, status: int, stream: bool, path: str):
    server = start(FakeReplicas(fail_with(error)))
    with server.http() as client:
        answer = client.post(path, json={**(CHAT if "chat" in path else COMPLETION), "stream": stream})
    assert answer.status_code == status, answer.text
    assert answer.json()["error"]["type"] == TYPES.get(status, "server_error")
    assert SECRET not in answer.text
    assert "Traceback" not in answer.text
    assert answer.headers.get("retry-after") == ("1" if status in (429, 503) else None)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
@pytest.mark.parametrize(("error", "status"), ERRORS, ids=lambda value: type(value).__name__)
def test_after_the_first_token_it_is_an_event_in_the_stream(start, error: Exception, status: int, path: str):
    server = start(FakeReplicas(fail_with(error, after_words=2)))
    with server.http() as client:
        answer = client.post(path, json={**(CHAT if "chat" in path else COMPLETION), "stream": True})
    assert answer.status_code == 200
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert events[-1] == "[DONE]"
    failure = json.loads(events[-2])["error"]
    assert set(failure) == {"message", "type", "param", "code"}
    assert failure["type"] == TYPES.get(status, "server_error")
    assert SECRET not in answer.text


@pytest.mark.usefixtures("none_continued")
def test_the_official_client_raises_its_own_error_for_a_broken_stream(start):
    server = start(FakeReplicas(fail_with(ray.exceptions.ActorDiedError(), after_words=2)))
    words = []
    with pytest.raises(openai.APIError, match="gone"):  # noqa: PT012
        for chunk in server.client().chat.completions.create(**CHAT, stream=True):
            words += [chunk.choices[0].delta.content]
    assert words == ["", " word", " word"]


def test_vllms_validation_error_keeps_its_parameter():
    error = translate(through_ray(VLLMValidationError("top_k is wrong", parameter="top_k")), "r")
    assert isinstance(error, VLLMValidationError)
    assert error.parameter == "top_k"
    assert isinstance(translate(KeyError("x"), "r"), GenerationError)


def test_no_replica_at_all_is_503_before_anything_is_sent(start):
    replicas = FakeReplicas(known_ranks=())
    server = start(replicas)
    with server.http() as client:
        answer = client.post("/v1/chat/completions", json={**CHAT, "stream": True})
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert not replicas.requests


def test_a_replica_that_ends_too_early_is_an_error_and_not_half_an_answer(start):
    async def half(request):
        yield say(request, [10], " half", finished=False)

    server = start(FakeReplicas(half))
    with server.http() as client:
        assert client.post("/v1/completions", json=COMPLETION).status_code == 500


@pytest.mark.parametrize(("constraint", "status"), [({}, 503), ({"structured_outputs": {"regex": "a+"}}, 400)])
def test_a_request_that_the_engine_gives_up_is_no_500(
    start, constraint: dict[str, Any], status: int, monkeypatch: pytest.MonkeyPatch
):
    async def fits(self: ConstraintPool, constraint: Any) -> GrammarVerdict:
        return GrammarVerdict(1, FITS)

    monkeypatch.setattr(ConstraintPool, "_try", fits)  # its process takes seconds to start, and is not what is tested

    async def give_up(request):
        output = say(request, [], "", finished=True)
        output.outputs[0].finish_reason = "error"
        yield output

    server = start(FakeReplicas(give_up))
    with server.http() as client:
        for stream in (False, True):
            answer = client.post("/v1/chat/completions", json={**CHAT, **constraint, "stream": stream})
            assert answer.status_code == status, answer.text


def test_a_request_that_takes_too_long_is_ended(start):
    replicas = FakeReplicas(think_for_ever)
    server = start(replicas, request_timeout_s=0.2)
    with server.http() as client:
        answer = reached(replicas, lambda: client.post("/v1/chat/completions", json=CHAT))
    assert answer.status_code == 503
    assert "too long" in answer.json()["error"]["message"]
    wait_until(lambda: replicas.requests[-1].request_id in replicas.aborted)


def test_a_client_that_leaves_in_mid_stream_has_its_request_aborted(start):
    replicas = FakeReplicas(speak_for_ever)
    server = start(replicas)
    with server.client().chat.completions.create(**CHAT, stream=True) as stream:
        assert [next(stream).choices[0].delta.content for _ in range(3)] == ["", " word", " word"]
    wait_until(lambda: replicas.aborted == [replicas.requests[0].request_id])
    check_all_is_free(server)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_before_the_first_token_has_its_request_aborted(start, stream: bool):
    replicas = FakeReplicas(think_for_ever)
    server = start(replicas)
    leave(server.url, {**CHAT, "stream": stream}, until=lambda: replicas.requests)
    wait_until(lambda: replicas.aborted == [replicas.requests[0].request_id])
    check_all_is_free(server)


def test_a_client_that_leaves_the_queue_is_never_sent_to_a_replica(start):
    replicas = FakeReplicas(think_for_ever)
    server = start(replicas, max_ongoing_requests=1, max_queued_requests=1)
    first = send(server.url, CHAT)
    wait_until(lambda: len(replicas.requests) == 1)
    leave(server.url, CHAT, until=lambda: parts(server)["waiting"] == 1)
    wait_until(lambda: parts(server)["waiting"] == 0)
    first.close()
    wait_until(lambda: parts(server)["ongoing"] == 0)
    assert len(replicas.requests) == 1
    replicas.script = speak
    with server.http() as client:
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200


def test_a_batch_of_prompts_that_loses_its_client_is_aborted_whole(start):
    replicas = FakeReplicas(think_for_ever)
    server = start(replicas)
    body = {**COMPLETION, "prompt": ["a", "b", "c"], "stream": True}
    leave(server.url, body, until=lambda: len(replicas.requests) == 3, path="/v1/completions")
    wait_until(lambda: sorted(replicas.aborted) == sorted(request.request_id for request in replicas.requests))
    check_all_is_free(server)


def test_two_requests_with_one_client_id_are_told_apart(start):
    replicas = FakeReplicas()
    server = start(replicas)

    async def both() -> None:
        async with httpx.AsyncClient(
            base_url=server.url, headers={"x-request-id": "mine"}, timeout=patience(60)
        ) as client:
            await asyncio.gather(*(client.post("/v1/chat/completions", json=CHAT) for _ in range(2)))

    asyncio.run(both())
    first, second = (request.request_id for request in replicas.requests)
    assert first != second
    assert first.startswith("chatcmpl-mine-")
