"""What is not served is said in words, in OpenAI's shape, with what is."""

from __future__ import annotations

import openai
import pytest
from ingress_server import CHAT, MODEL


def test_embeddings_are_404_to_the_official_client_which_learns_what_is_served(server):
    with pytest.raises(openai.NotFoundError) as refused:
        server.client().embeddings.create(model=MODEL, input="a text")
    said = refused.value.body["message"]
    assert "/v1/embeddings" in said
    assert "no embeddings" in said
    assert all(path in said for path in ("/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/models"))
    assert set(refused.value.body) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/audio/speech"),
        ("POST", "/v1/images/generations"),
        ("POST", "/v1/rerank"),
        ("GET", "/v1/files"),
        ("GET", "/v1/models/demo"),
        ("DELETE", "/v1/responses/resp_1"),
        ("POST", "/v1/nobody/knows/this"),
        ("GET", "/v1/"),
    ],
)
def test_other_routes_are_404_in_words(server, method: str, path: str):
    with server.http() as client:
        answer = client.request(method, path, json={} if method == "POST" else None)
    assert answer.status_code == 404
    assert answer.json()["error"]["message"].startswith(f"This server does not serve {path}. ")


def test_a_wrong_method_is_405_and_other_paths_are_as_they_were(server):
    with server.http() as client:
        assert client.get("/v1/responses").status_code == 405
        assert client.get("/nothing").json()["error"]["message"] == "There is no /nothing."


def test_what_is_not_served_needs_a_key_too(start):
    server = start(api_keys={"key-a": "alice"})
    with server.http() as client:
        assert client.post("/v1/embeddings", json=CHAT).status_code == 401
