"""Errors have OpenAI's types, codes and params, and are no longer than a sentence or two."""

from __future__ import annotations

import json
from typing import Any

import pytest

from app.dialects.errors import MOST_CHARACTERS, event_in_openais_words, in_openais_words


@pytest.mark.parametrize(
    ("status", "error", "told"),
    [
        (400, {"message": "No.", "param": "body.seed", "code": 400}, ("invalid_request_error", None, "seed")),
        (404, {"message": "No.", "param": "model", "code": 404}, ("invalid_request_error", "model_not_found", "model")),
        (404, {"message": "No."}, ("invalid_request_error", None, None)),
        (401, {"message": "No."}, ("invalid_request_error", "invalid_api_key", None)),
        (403, {"message": "No."}, ("permission_error", None, None)),
        (429, {"message": "No."}, ("rate_limit_error", "rate_limit_exceeded", None)),
        (500, {"message": "No."}, ("server_error", "internal_error", None)),
        (503, {"message": "No."}, ("server_error", "service_unavailable", None)),
        (400, {"message": "Its maximum context length is 4."},
         ("invalid_request_error", "context_length_exceeded", None)),
        (400, {"message": None, "param": 5, "code": "x"}, ("invalid_request_error", None, None)),
    ],
)  # fmt: skip
def test_they_are_told_as_the_clients_know_them(status: int, error: dict[str, Any], told: tuple[Any, ...]):
    words = in_openais_words(status, error)
    assert (words.type, words.code, words.param) == told
    assert words.message


def test_a_long_message_is_cut():
    words = in_openais_words(400, {"message": "a" * 5000})
    assert len(words.message) == MOST_CHARACTERS


def test_an_event_is_told_the_same():
    event = 'data: {"error": {"message": "No.", "type": "X", "param": null, "code": 503}}\n\n'
    told = event_in_openais_words(event)
    assert told.endswith("\n\n")
    error = json.loads(told.removeprefix("data: "))["error"]
    assert error == {"message": "No.", "type": "server_error", "param": None, "code": "service_unavailable"}
