import asyncio
import json

import httpx
import pytest

from load_tests.faults.streams import Stream, run_stream
from load_tests.harness.client import Client

TOKEN = {"choices": [{"token_ids": [7]}]}
USAGE = {"choices": [], "usage": {"kv_cache": {"cpu": 3}}}
FAILED = {"error": {"message": "The engine died."}}


def read(*events, content_type="text/event-stream", status=200):
    text = "".join(f"data: {event if isinstance(event, str) else json.dumps(event)}\n\n" for event in events)
    answer = httpx.Response(status, text=text, headers={"content-type": content_type})

    async def run():
        async with Client("http://fake", "fake", transport=httpx.MockTransport(lambda _: answer)) as client:
            stream = Stream([1, 2])
            await run_stream(client, stream, 2)
            return stream

    return asyncio.run(run())


def test_a_whole_stream_has_its_tokens_its_usage_and_an_end():
    stream = read(TOKEN, TOKEN, USAGE, "[DONE]")
    assert (stream.tokens, stream.kv_cache, stream.ended, stream.error) == ([7, 7], {"cpu": 3}, True, "")
    assert stream.begun.is_set()
    assert 0 < stream.first_token_s <= stream.seconds


def test_a_stream_that_breaks_off_has_no_end_and_no_error():
    stream = read(TOKEN)
    assert (stream.tokens, stream.ended, stream.error) == ([7], False, "")


def test_an_error_event_is_kept_with_what_came_before():
    stream = read(TOKEN, FAILED, "[DONE]")
    assert (stream.tokens, stream.error) == ([7], "The engine died.")


@pytest.mark.parametrize("events", [("no JSON",), ([1],), ({"id": "an event without choices"},)])
def test_what_is_not_openais_wire_format_is_said(events):
    assert "wire format" in read(*events, "[DONE]").error


def test_a_stream_of_another_type_is_refused():
    assert "wire format" in read(TOKEN, "[DONE]", content_type="text/plain").error


def test_a_refused_stream_says_why():
    stream = read(FAILED, status=503)
    assert "503" in stream.error
    assert not stream.ended
