"""What is not served is said in words, in OpenAI's shape, with what is."""

from __future__ import annotations

import openai
import pytest
from fake_backend import FakeReplicas
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


@pytest.mark.parametrize("name", ["another", "org/another", "a b%/?", "x" * 3000, "../demo"])
def test_a_model_that_is_not_served_is_404_to_the_official_client(server, name: str):
    with pytest.raises(openai.NotFoundError) as refused:
        server.client().models.retrieve(name)
    assert refused.value.param == "model"
    assert f"`{MODEL}`" in refused.value.body["message"]
    assert len(refused.value.body["message"]) < 400


def test_the_served_model_is_found_by_its_id(server):
    client = server.client()
    (listed,) = client.models.list().data
    found = client.models.retrieve(MODEL)
    assert (found.id, found.object, found.owned_by) == (listed.id, listed.object, listed.owned_by)


def test_an_id_with_slashes_is_one_id(vllm_config, fresh, monkeypatch):
    monkeypatch.setattr("configs.settings.Settings.model_name", property(lambda self: "org/demo-1"))
    client = fresh().client()
    assert client.models.retrieve("org/demo-1").id == "org/demo-1"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("demo-1")


def test_models_need_a_key_and_an_empty_id_is_none(start):
    with start(api_keys={"key-a": "alice"}).http() as client:
        assert client.get(f"/v1/models/{MODEL}").status_code == 401
        assert client.get("/v1/models/", headers={"authorization": "Bearer key-a"}).status_code == 404


@pytest.mark.parametrize("path", ["/v1/models", f"/v1/models/{MODEL}"])
def test_a_model_is_listed_while_a_replica_can_answer(fresh, path: str) -> None:
    replicas = FakeReplicas()
    with fresh(replicas).http() as client:
        assert client.get(path).status_code == 200
        replicas.known_ranks = set()
        refused = client.get(path)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "service_unavailable")
        assert refused.headers["retry-after"]
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 503
