"""A replica that is gone before its first output costs nobody an answer; `tests/app/continuation`: one gone later."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import ray.exceptions
from failed_replicas import STOPPED, check_all_is_free, leave, through_ray
from fake_backend import FakeReplicas, gone_at, speak, speak_for_ever, think_for_ever
from ingress_server import CHAT, COMPLETION, Server, reached, wait_until
from prometheus_client.parser import text_string_to_metric_families
from ray.serve.exceptions import BackPressureError, ReplicaUnavailableError
from vllm.v1.engine.exceptions import EngineDeadError

from app.metrics.labels import GONE_REASONS
from deployments.engine.crash_report import EngineDiedError
from deployments.protocol.wire import GenerateRequest

DIED = ray.exceptions.ActorDiedError()
GONE = [
    (DIED, "process_gone"),
    (through_ray(DIED), "process_gone"),
    (ray.exceptions.ActorUnavailableError("gone", b"x" * 16), "unreachable"),
    (ReplicaUnavailableError("a"), "unreachable"),
    (STOPPED, "stopped"),
    (through_ray(EngineDeadError()), "engine_dead"),
    (ray.exceptions.RayTaskError("generate", "Traceback", EngineDeadError(), proctitle="x", pid=1), "engine_dead"),
]
NOT_GONE = [ValueError("bad"), through_ray(ValueError("bad")), BackPressureError(5, 5), TimeoutError(), KeyError("x")]


def ask(server: Server, path: str = "/v1/chat/completions", headers: dict[str, str] | None = None, **more: Any) -> Any:
    body = {**(CHAT if "chat" in path else COMPLETION), **more}
    with server.http() as client:
        return client.post(path, json=body, headers=headers)


def retried(server: Server) -> dict[str, float]:
    with server.http() as client:
        families = text_string_to_metric_families(client.get("/metrics").text)
    (family,) = [family for family in families if family.name == "crosskv_retried_prompts"]
    return {sample.labels["reason"]: sample.value for sample in family.samples if sample.name.endswith("_total")}


def text_of(answer: Any) -> str:
    """A chat's answer without what differs from request to request."""
    if "data:" not in answer.text:
        return answer.json()["choices"][0]["message"]["content"]
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    return "".join(event["choices"][0]["delta"].get("content") or "" for event in events)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("error", "reason"), GONE, ids=lambda value: str(type(value).__name__))
def test_what_has_given_nothing_is_answered_by_another_replica(
    start, fresh, caplog, error: Exception, reason: str, stream: bool
):
    replicas = FakeReplicas(gone_at("a", error=error))
    server, undisturbed = fresh(replicas), start(FakeReplicas())
    answer = ask(server, stream=stream)
    assert answer.status_code == 200
    assert text_of(answer) == text_of(ask(undisturbed, stream=stream)) == " one two three"
    assert [request.progress.replica for request in replicas.requests] == ["a", "b"]
    assert retried(server) == {**dict.fromkeys(GONE_REASONS, 0), reason: 1}
    assert len([record for record in caplog.records if "sent again" in record.message]) == 1
    check_all_is_free(server)


def test_a_prompt_outlives_two_replicas_that_were_ended_and_goes_back_to_neither(start):
    replicas = FakeReplicas(gone_at("a", "b", error=STOPPED))
    server = start(replicas)
    answer = ask(server, path="/v1/completions")
    assert answer.json()["choices"][0]["text"] == " one two three"
    assert [request.avoid for request in replicas.requests] == [(), ("a",), ("a", "b")]
    assert retried(server)["stopped"] == 2


def ended_by(server: Server) -> tuple[float, float]:
    """Prompts that have ended an engine, and requests refused for it."""
    with server.http() as client:
        families = {f.name: f.samples for f in text_string_to_metric_families(client.get("/metrics").text)}
    names = ("crosskv_poison_prompts", "crosskv_poison_refusals")
    found = tuple(next(s.value for s in families[name] if s.name.endswith("_total")) for name in names)
    return found[0], found[1]


def dies_of(request: GenerateRequest, *names: str) -> Exception:
    """As a replica raises whose engine died; it names itself, or others."""
    return through_ray(EngineDiedError(names or (request.request_id,)))


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_prompt_that_its_engine_names_alone_is_given_to_no_other_and_refused_for_a_while(fresh, caplog, stream: bool):
    replicas = FakeReplicas(lambda request: gone_at("a", "b", "c", error=dies_of(request))(request))
    server = fresh(replicas)
    answer = ask(server, stream=stream)
    assert answer.status_code == 500
    assert "refused for 600 s" in answer.json()["error"]["message"]
    assert len(replicas.requests) == 1
    again = ask(server, stream=stream, seed=5)
    assert (again.status_code, "ended an engine" in again.json()["error"]["message"]) == (503, True)
    assert again.headers["retry-after"]
    assert len(replicas.requests) == 1
    assert ended_by(server) == (1, 1)
    (line,) = [record.message for record in caplog.records if "has ended an engine" in record.message]
    assert "red ball" not in line
    replicas.script = speak
    assert ask(server, messages=[{"role": "user", "content": "Another prompt"}]).status_code == 200
    check_all_is_free(server)


@pytest.mark.parametrize("name", ["a\nb", "a\x00b", "a\u2028b", "\x1b[2Ja", "é"])
def test_no_request_id_writes_into_the_log_or_reaches_an_engine(start, caplog, name: str):
    """An engine's ids, and the log's lines, have the client's in them."""
    replicas = FakeReplicas(speak)
    server = start(replicas)
    assert ask(server, request_id=name).status_code == 400
    assert not replicas.requests
    assert [record.message for record in caplog.records if not record.message.isprintable()] == []


def test_another_tenants_prompt_of_the_same_words_is_not_refused(fresh):
    replicas = FakeReplicas(lambda request: gone_at("a", "b", "c", error=dies_of(request))(request))
    server = fresh(replicas, api_keys={"key-one": "one", "key-two": "two"})
    keys = [{"Authorization": f"Bearer key-{name}"} for name in ("one", "two")]
    assert ask(server, headers=keys[0]).status_code == 500
    replicas.script = speak
    assert ask(server, headers=keys[0]).status_code == 503
    assert ask(server, headers=keys[1]).status_code == 200


def test_who_was_only_there_when_an_engine_died_is_answered_elsewhere_any_number_of_times(fresh):
    replicas = FakeReplicas(lambda request: gone_at("a", "b", error=dies_of(request, "somebody else"))(request))
    server = fresh(replicas)
    assert ask(server).status_code == 200
    assert [request.avoid for request in replicas.requests] == [(), ("a",), ("a", "b")]
    assert ended_by(server) == (0, 0)


@pytest.mark.parametrize("error", [DIED, through_ray(EngineDeadError())], ids=["killed", "engine"])
def test_without_a_witness_a_prompt_is_tried_once_more_and_no_third_time(fresh, error: Exception):
    replicas = FakeReplicas(gone_at("a", "b", "c", error=error))
    server = fresh(replicas)
    answer = ask(server)
    assert answer.status_code == 500
    assert len(replicas.requests) == 2
    assert ended_by(server) == (1, 0)
    check_all_is_free(server)


def test_a_stream_that_ends_its_engine_after_a_token_is_refused_when_it_comes_again(fresh):
    def one_word(request: GenerateRequest) -> Any:
        return gone_at("a", "b", "c", error=dies_of(request), after_words=1)(request)

    replicas = FakeReplicas(one_word)
    server = fresh(replicas)
    answer = ask(server, stream=True)
    events = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
    assert json.loads(events[-2])["error"]["code"] == "internal_error"
    assert ask(server, stream=True).status_code == 503
    assert len(replicas.requests) == 2, "most such deaths are the engine's own, so one continuation is risked"


def test_of_two_suspects_the_plain_one_is_answered_and_the_odd_one_is_given_to_no_other_engine(fresh):
    """Both were new in the step that died: a second engine is risked for neither."""

    def script(request: GenerateRequest) -> Any:
        if request.progress.replica != "a":
            return speak(request)
        return both_are_there_and_die(request)

    async def both_are_there_and_die(request: GenerateRequest) -> Any:
        while len(replicas.requests) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        raise dies_of(request, *(other.request_id for other in replicas.requests[:2]))
        yield

    replicas = FakeReplicas(script)
    server = fresh(replicas)
    with ThreadPoolExecutor() as threads:
        odd = threads.submit(ask, server, temperature=0.8, seed=7, logprobs=True)
        plain = threads.submit(ask, server, messages=[{"role": "user", "content": "Hello"}])
        assert plain.result().status_code == 200
        assert odd.result().status_code == 500
    assert len(replicas.requests) == 3
    assert ended_by(server) == (1, 0)


def test_each_attempt_has_an_id_and_parameters_of_its_own(start):
    def spoil(request: GenerateRequest) -> Any:
        assert request.sampling_params.extra_args is None
        assert request.sampling_params.max_tokens == 3
        assert not request.progress.first_token
        request.sampling_params.extra_args = {"spoiled": True}
        request.sampling_params.max_tokens = 1
        request.progress.first_token = True
        return gone_at("a", "b", error=STOPPED)(request)

    replicas = FakeReplicas(spoil)
    server = start(replicas)
    assert ask(server).status_code == 200
    first, *others = (request.request_id for request in replicas.requests)
    assert others == [f"{first}-retry1", f"{first}-retry2"]
    assert len({(*request.prompt_token_ids, *request.block_hashes) for request in replicas.requests}) == 1


def test_when_all_are_gone_it_is_503_after_as_many_retries_as_there_are_replicas(start):
    replicas = FakeReplicas(gone_at("a", "b", "c", error=STOPPED))
    server = start(replicas)
    answer = ask(server)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert len(replicas.requests) == 3, "the server has two replicas"
    check_all_is_free(server)


def test_without_any_replica_left_nothing_is_sent_again(fresh):
    def last_one(request: GenerateRequest) -> Any:
        replicas.known_ranks = ()
        return gone_at("a", error=DIED)(request)

    replicas = FakeReplicas(last_one, known_ranks={0})
    answer = ask(fresh(replicas))
    assert answer.status_code == 503
    assert answer.headers["retry-after"]
    assert len(replicas.requests) == 1


def test_a_pinned_prompt_is_not_moved(fresh):
    replicas = FakeReplicas(gone_at("a", error=DIED))
    server = fresh(replicas)
    answer = ask(server, headers={"X-CrossKV-Replica": "0"})
    assert answer.status_code == 503
    assert len(replicas.requests) == 1
    assert sum(retried(server).values()) == 0


@pytest.mark.parametrize("error", NOT_GONE, ids=lambda error: type(error).__name__)
def test_what_is_not_the_replicas_death_is_not_tried_again(start, error: Exception):
    replicas = FakeReplicas(gone_at("a", error=error))
    server = start(replicas)
    assert ask(server).status_code in (400, 429, 500, 503)
    assert len(replicas.requests) == 1
    assert sum(retried(server).values()) == 0


@pytest.mark.parametrize("then", [think_for_ever, speak_for_ever], ids=["silent", "speaking"])
@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_a_client_that_leaves_during_a_retry_has_the_live_attempt_aborted(fresh, then, stream: bool):
    dying = gone_at("a", error=DIED)
    replicas = FakeReplicas(lambda request: (then if request.avoid else dying)(request))
    server = fresh(replicas)
    leave(server.url, {**CHAT, "stream": stream}, until=lambda: len(replicas.requests) == 2)
    wait_until(lambda: replicas.aborted == [replicas.requests[1].request_id])
    check_all_is_free(server)


def test_the_deadline_covers_all_attempts_together(fresh):
    dying = gone_at("a", error=DIED)
    replicas = FakeReplicas(lambda request: (think_for_ever if request.avoid else dying)(request))
    server = fresh(replicas, request_timeout_s=2.0)
    answer = reached(replicas, lambda: ask(server), attempts=2)
    assert answer.status_code == 503
    assert "too long" in answer.json()["error"]["message"]
    wait_until(lambda: replicas.requests[-1].request_id in replicas.aborted)
    assert replicas.requests[-2].request_id not in replicas.aborted, "it had ended by itself"


def test_of_several_prompts_only_those_whose_replica_is_gone_are_sent_again(fresh):
    def script(request: GenerateRequest) -> Any:
        lost = request is replicas.requests[0]
        return (gone_at("a", error=DIED) if lost else speak)(request)

    replicas = FakeReplicas(script)
    server = fresh(replicas)
    answer = ask(server, path="/v1/completions", prompt=["one", "two"], n=2, temperature=1)
    assert answer.status_code == 200
    assert sorted(len(request.avoid) for request in replicas.requests) == [0, 0, 1]
