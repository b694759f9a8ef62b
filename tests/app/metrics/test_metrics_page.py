"""docs/guide/metrics.md is generated, complete, and up to date; labels are bounded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from fake_backend import FakeReplicas
from ingress_server import CHAT, Server
from prometheus_client.parser import text_string_to_metric_families

from app.metrics import document
from app.metrics.catalogue import LABELS, catalogue
from app.metrics.manager import COUNTER_TEXTS
from configs.model_folder import PROJECT_ROOT
from kvmanager.config import ManagerConfig
from kvmanager.manager import KVManager

_CONSTRUCTED = re.compile(r"(?:Counter|Gauge|Histogram)(?:MetricFamily)?\(\s*\"(crosskv_\w+)\"")
STRANGE = "Zanzibar-7f3a"
"""What a stranger writes wherever a request has room for words."""


def test_the_page_is_up_to_date() -> None:
    assert document.main(["--check"]) == 0


def test_a_stale_page_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(document, "PROJECT_ROOT", tmp_path)
    monkeypatch.setattr(document, "PAGE", tmp_path / "metrics.md")
    document.PAGE.write_text("old")
    assert document.main(["--check"]) == 1
    assert "python -m app.metrics.document" in capsys.readouterr().err
    assert document.main([]) == 0
    assert document.main(["--check"]) == 0


def test_no_metric_of_the_code_is_left_out() -> None:
    listed = {one.name.removesuffix("_total") for one in catalogue()}
    sources = [path.read_text() for room in ("app", "deployments") for path in (PROJECT_ROOT / room).rglob("*.py")]
    named = {name for source in sources for name in _CONSTRUCTED.findall(source)}
    assert len(named) > 50
    assert named - listed == set()


def test_every_counter_of_the_manager_says_what_it_counts() -> None:
    stats = KVManager(ManagerConfig(blocks_per_segment=1), epoch=1).stats(0.0)
    shown = {name for name in stats["counters"] if not name.startswith("chunk_tokens_")}
    assert set(COUNTER_TEXTS) == shown


def test_every_metric_is_described() -> None:
    for one in catalogue():
        assert one.text.endswith(".")
        assert one.type in {"counter", "gauge", "histogram"}, "the page tells these apart"
        assert one.name.endswith("_total") == (one.type == "counter")
        assert re.fullmatch(r"crosskv_[a-z0-9_]+", one.name)


def test_every_label_is_one_whose_values_are_bounded() -> None:
    used = {label for one in catalogue() for label in one.labels}
    assert used == set(LABELS)


def scraped(server: Server, key: str) -> str:
    with server.http(headers={"Authorization": f"Bearer {key}"}) as http:
        answer = http.get("/metrics")
    assert answer.status_code == 200
    return answer.text


def test_nothing_that_a_client_writes_becomes_a_label(fresh) -> None:
    keys = {"ops-key-of-the-test": {"tenant": "operators", "admin": True}, "a-key-of-the-test": "acme"}
    server = fresh(FakeReplicas(), api_keys=keys)
    with server.http(headers={"Authorization": "Bearer a-key-of-the-test"}) as http:
        assert http.post("/v1/chat/completions", json=CHAT).status_code == 200
    before = {(s.name, *s.labels.items()) for s in samples(scraped(server, "ops-key-of-the-test"))}
    for number in range(3):
        word = f"{STRANGE}-{number}"
        body = CHAT | {"user": word, "messages": [{"role": "user", "content": word}], "request_id": word}
        for headers in ({"Authorization": "Bearer a-key-of-the-test"}, {"Authorization": f"Bearer {word}"}):
            more = {"X-Request-Id": word, "User-Agent": word, "X-Tenant": word, "OpenAI-Organization": word}
            with server.http(headers=headers | more) as http:
                http.post("/v1/chat/completions", json=body)
                http.post("/v1/chat/completions", json=body | {"model": word})
                http.get(f"/{word}")
                http.request(word[:8], "/health")
    text = scraped(server, "ops-key-of-the-test")
    assert STRANGE.lower() not in text.lower()
    grown = {(s.name, *s.labels.items()) for s in samples(text)} - before
    assert {name for name, *_ in grown} <= {"crosskv_requests_total", "crosskv_requests_created"}
    assert len(grown) < 20, "paths and statuses, not one of each request"


def test_tenants_are_named_by_tags_of_those_that_are_configured(fresh) -> None:
    keys = {"ops-key-of-the-test": {"tenant": "operators", "admin": True}, "a-key-of-the-test": "acme"}
    server = fresh(FakeReplicas(), api_keys=keys)
    for key in ("a-key-of-the-test", "ops-key-of-the-test", "no-key-of-anybody"):
        with server.http(headers={"Authorization": f"Bearer {key}"}) as http:
            http.post("/v1/chat/completions", json=CHAT | {"user": "somebody"})
    found = {s.labels["tenant"] for s in samples(scraped(server, "ops-key-of-the-test")) if "tenant" in s.labels}
    assert len(found) == 2
    assert not found & {"acme", "operators", "somebody"}, "a tag, no name"


def samples(text: str) -> list:
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]
