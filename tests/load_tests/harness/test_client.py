import asyncio
import json
import threading
import time
from contextlib import contextmanager

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, StreamingResponse
from starlette.routing import Route

from app.launch.ports import free_port
from load_tests.harness.client import Client, StatusError, pinned, run_workload
from load_tests.workloads.workload import Message, Request, Workload


class FakeServer:
    """An OpenAI server whose answers repeat the number of the request that it got."""

    def __init__(self):
        self.bodies = []
        self.headers = []
        self.under_way = 0
        self.most_under_way = 0
        self.status = 200
        self.breaks_off = False
        self.says_in_stream = None
        self.seconds_per_token = 0.0
        self.usage = {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 4}}

    def app(self):
        return Starlette(
            routes=[
                Route("/v1/models", self.models, methods=["GET", "POST"]),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
            ]
        )

    async def models(self, request):
        self.headers.append(dict(request.headers))
        if self.status == 401:
            return JSONResponse({}, 401)
        return JSONResponse({"data": [{"id": "fake"}]})

    async def chat(self, request):
        body = await request.json()
        self.bodies.append(body)
        if self.status != 200:
            return JSONResponse({"error": {"message": "no room"}}, self.status)
        return StreamingResponse(self.events(len(self.bodies) - 1), media_type="text/event-stream")

    async def events(self, number):
        self.under_way += 1
        self.most_under_way = max(self.most_under_way, self.under_way)
        try:
            yield event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
            if self.says_in_stream:
                yield event({"error": {"message": self.says_in_stream}})
            for word in ("answer", " ", str(number)):
                await asyncio.sleep(self.seconds_per_token)
                yield event({"choices": [{"delta": {"content": word}}]})
            if self.breaks_off:
                return
            yield event({"choices": [], "usage": self.usage})
            yield "data: [DONE]\n\n"
        finally:
            self.under_way -= 1


def event(chunk):
    return f"data: {json.dumps(chunk)}\n\n"


@contextmanager
def serving(fake):
    port = free_port()
    server = uvicorn.Server(uvicorn.Config(fake.app(), port=port, log_level="error"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = server.force_exit = True
        thread.join()


@pytest.fixture
def fake():
    return FakeServer()


@pytest.fixture
def url(fake):
    with serving(fake) as url:
        yield url


def request(number, *, at_s=0.0, after=None, messages=None, returning=False):
    chosen = messages or (Message("user", f"question {number}"),)
    return Request(number, "session", at_s, after, chosen, 3, returning)


def run(url, *requests, concurrency=None, **options):
    workload = Workload("made up", requests, concurrency)
    return asyncio.run(run_workload(url, "fake", workload, **options))


def test_a_streamed_answer_is_timed_and_its_usage_kept(fake, url):
    fake.seconds_per_token = 0.02
    fake.usage["kv_cache"] = {"device": 4, "cpu": 0, "redis": 0, "recomputed": 3, "replica": "1"}
    [found] = run(url, request(0, returning=True))
    assert found.error is None
    assert found.returning
    assert (found.prompt_tokens, found.output_tokens, found.cached_tokens) == (7, 3, 4)
    assert found.kv_cache["replica"] == "1"
    assert 0.02 <= found.ttft_s < found.ended_s - found.sent_s
    assert 0 < found.tpot_s <= (found.ended_s - found.sent_s - found.ttft_s) / 2


def test_the_event_that_only_names_the_role_is_not_the_first_token(fake, url):
    fake.seconds_per_token = 0.05
    [found] = run(url, request(0))
    assert found.ttft_s >= 0.05


def test_answers_are_as_long_as_asked_for_and_greedy(fake, url):
    run(url, request(0))
    body = fake.bodies[0]
    assert body["ignore_eos"] is True
    assert (body["max_tokens"], body["temperature"], body["stream"]) == (3, 0, True)
    assert body["stream_options"] == {"include_usage": True}


def test_a_conversation_goes_on_from_what_the_server_answered(fake, url):
    question, answer = Message("user", "q"), Message("assistant", None)
    found = run(
        url,
        request(0, messages=(question,)),
        request(1, after=0, messages=(question, answer, question)),
        request(2, after=1, messages=(question, answer, question, answer, question)),
    )
    assert [one.error for one in found] == [None, None, None]
    said = [message["content"] for message in fake.bodies[2]["messages"]]
    assert said == ["q", "answer 0", "q", "answer 1", "q"]


def test_what_goes_on_from_a_failed_answer_fails_and_the_rest_does_not(fake, url):
    question, answer = Message("user", "q"), Message("assistant", None)
    fake.says_in_stream = "out of memory"
    first, second = run(
        url, request(0, messages=(question,)), request(1, after=0, messages=(question, answer, question))
    )
    assert "out of memory" in first.error
    assert "has failed" in second.error
    assert len(fake.bodies) == 1


def test_no_more_requests_than_the_concurrency_are_under_way(fake, url):
    fake.seconds_per_token = 0.01
    found = run(url, *(request(number) for number in range(6)), concurrency=2)
    assert [one.number for one in found] == list(range(6))
    assert fake.most_under_way == 2


def test_with_a_concurrency_the_order_is_the_workloads_even_where_a_request_has_to_wait(fake, url):
    fake.seconds_per_token = 0.01
    order = [request(number) for number in range(4)]
    order += [request(number, after=after) for number, after in enumerate((3, 0, 2, 0, 1), start=4)]
    found = run(url, *order, concurrency=2)
    assert [one.error for one in found] == [None] * 9
    assert [one.number for one in sorted(found, key=lambda one: one.sent_s)] == list(range(9))
    assert found[4].sent_s >= found[3].ended_s
    assert fake.most_under_way == 2


def test_an_open_loop_sends_every_request_at_its_time(fake, url):
    fake.seconds_per_token = 0.1
    found = run(url, request(0), request(1, at_s=0.05))
    assert found[1].sent_s >= 0.05
    assert fake.most_under_way == 2


def test_an_error_of_the_server_is_recorded_in_its_own_words(fake, url):
    fake.status = 503
    ended = []
    found = run(url, request(0), request(1), on_done=ended.append)
    assert [one.error for one in found] == ["StatusError: 503 no room"] * 2
    assert len(ended) == 2


def test_a_stream_that_breaks_off_is_an_error(fake, url):
    fake.breaks_off = True
    [found] = run(url, request(0))
    assert "without [DONE]" in found.error


def test_a_request_that_takes_too_long_is_an_error(fake, url):
    fake.seconds_per_token = 5.0
    [found] = run(url, request(0), timeout_s=0.2)
    assert found.error == "not answered within 0.2 s"


def test_fields_of_the_callers_go_into_every_request(fake, url):
    run(url, request(0), extra_body={"kv_cache": {"fidelity": "tolerant"}})
    assert fake.bodies[0]["kv_cache"] == {"fidelity": "tolerant"}


def test_a_question_without_a_stream_has_headers_of_its_own_where_some_are_given(fake, url):
    async def ask(replica):
        async with Client(url, "fake", "the client's") as client:
            return await client.post("/v1/models", {}, pinned(replica))

    assert asyncio.run(ask(None)) == {"data": [{"id": "fake"}]}
    asyncio.run(ask(1))
    assert [headers.get("x-crosskv-replica") for headers in fake.headers] == [None, "1"]
    assert {headers["authorization"] for headers in fake.headers} == {"Bearer the client's"}
    fake.status = 401
    with pytest.raises(StatusError, match="401"):
        asyncio.run(ask(None))
