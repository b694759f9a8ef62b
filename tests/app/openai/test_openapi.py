"""The description of the API: served, complete, and usable where there is no internet. `tests/fuzz` holds it true."""

from __future__ import annotations

import base64
import hashlib
import re
from concurrent.futures import ThreadPoolExecutor

from fake_backend import FakeReplicas, backend
from fastapi.routing import APIRoute
from ingress_server import FINGERPRINT, SECRET, settings_with

from app import document
from app.gate.auth import METRICS, OPEN_PATHS
from app.ingress import create_app
from app.openai import openapi_schema
from app.page.files import PATHS as PAGE


def described(server):
    with server.http() as client:
        answer = client.get("/openapi.json")
    assert answer.status_code == 200
    return answer.json()


def test_every_route_is_described_with_its_answers(server, vllm_config):
    paths = described(server)["paths"]
    app = create_app(settings_with(), vllm_config, backend(FakeReplicas()), FINGERPRINT, SECRET, loopback=True)
    routes = {
        (route.path_format, method) for route in app.routes if isinstance(route, APIRoute) for method in route.methods
    }
    shown = {(path, method.upper()) for path, item in paths.items() for method in item}
    page = {(path, method) for path in PAGE for method in ("GET", "HEAD")}
    assert routes - shown == {("/openapi.json", "GET"), ("/docs", "GET")} | page
    for path, item in paths.items():
        for operation in item.values():
            answers = set(operation["responses"])
            assert {"400", "413", "429", "503"} <= answers
            assert "422" not in answers
            assert ("401" in answers) == (path not in OPEN_PATHS - {METRICS}) == ("security" in operation)
            assert ("415" in answers) == ("requestBody" in operation)


def test_it_is_made_once_and_when_somebody_asks_first(fresh, monkeypatch):
    made, schema = [], {"info": {"title": "", "description": "", "version": ""}, "paths": {}, "components": {}}
    monkeypatch.setattr(openapi_schema, "describe", lambda *of: made.append(of) or schema)
    server = fresh()
    with server.http() as client:
        assert client.get("/health").status_code == 200
        assert made == []
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(client.get, ("/openapi.json", "/docs") * 4))
    assert {answer.status_code for answer in answers} == {200}
    assert len(made) == 1


def test_where_it_cannot_be_made_that_is_said_and_the_next_request_tries_again(fresh, monkeypatch, caplog):
    schema = {"info": {"title": "", "description": "", "version": ""}, "paths": {}, "components": {}}
    outcomes = iter([RuntimeError("a route is odd"), RuntimeError("it still is"), schema])

    def describe(*of):
        outcome = next(outcomes)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(openapi_schema, "describe", describe)
    with fresh().http() as client:
        refused = [client.get(path) for path in ("/openapi.json", "/docs")]
        answered = [client.get(path).status_code for path in ("/openapi.json", "/docs")]
    assert [answer.status_code for answer in refused] == [503, 503]
    assert "retry-after" in refused[0].headers
    assert "odd" not in refused[0].json()["error"]["message"]
    assert answered == [200, 200]
    assert len([line for line in caplog.records if line.name == openapi_schema.__name__]) == 1


def test_it_can_be_read_without_a_key_and_without_the_internet(server, fresh, monkeypatch):
    schema = described(server)  # takes seconds to make, and does not depend on keys
    monkeypatch.setattr(openapi_schema, "describe", lambda *of: schema)
    keyed = fresh(api_keys={"key-a": "alice"})
    paths = described(keyed)["paths"]
    with keyed.http() as client:
        page = client.get("/docs")
    assert page.status_code == 200
    assert page.headers["content-type"].startswith("text/html")
    assert all(path in page.text for path in paths)
    assert not re.findall(r"(?:src|href)=[\"']?(?:https?:)?//", page.text)
    assert "<script" not in page.text


def test_it_comes_under_headers_that_let_it_load_nothing_but_its_own_style(server):
    with server.http() as client:
        page, description = client.get("/docs"), client.get("/openapi.json")
    (style,) = re.findall(r"<style>(.*?)</style>", page.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    for answer in (page, description):
        policy = answer.headers["content-security-policy"].split("; ")
        assert {"default-src 'none'", f"style-src 'sha256-{digest}'", "frame-ancestors 'none'"} <= set(policy)
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["x-frame-options"] == "DENY"


def test_the_page_on_the_api_is_up_to_date(server):
    page = document.PAGE.read_text()
    written_by_hand, marker, _ = page.partition(document.MARKER)
    assert marker
    assert document.http_api_page(written_by_hand, described(server)) == page
