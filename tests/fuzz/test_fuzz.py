"""A short run of `make fuzz`, always the same: what it finds at length becomes a test elsewhere."""

from __future__ import annotations

import environment  # noqa: F401
from decoder_fuzz import DecoderFuzz
from fake_backend import FakeReplicas, backend
from ingress_server import engine_args, serve

from app.ingress import frontend_config
from tests.sizes import FUZZED_REQUESTS

SEED = 15


def test_every_answer_is_as_the_description_says_and_none_is_a_server_error():
    from api_fuzz import ApiFuzz  # schemathesis takes a second, which each process would wait for that collects tests

    api_keys = {"key-of-alice": "alice"}
    alice = ("alice", "key-of-alice")
    keys = [alice, alice, ("wrong", "wrong"), alice, ("none", None)]
    with serve(frontend_config(engine_args()), backend(FakeReplicas()), api_keys=api_keys) as server:
        report = ApiFuzz(server.url, keys, SEED).run(FUZZED_REQUESTS)
    assert report.failures == {}
    assert report.cases >= FUZZED_REQUESTS
    routes = {route for route, _, status in report.answers if status == "2xx"}
    assert {"POST /v1/chat/completions", "POST /v1/completions", "POST /api/v1/kv/pin", "GET /health"} <= routes


def test_whatever_reads_stored_bytes_reads_them_or_refuses_them_in_its_own_words():
    fuzz = DecoderFuzz(SEED)
    fuzz.run(200)
    assert fuzz.failures == {}
    assert {outcome for _, outcome in fuzz.outcomes} == {"read", "refused"}
