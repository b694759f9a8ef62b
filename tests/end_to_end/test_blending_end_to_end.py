"""Documents that a server stores by themselves, for prompts that blend them; and what is refused."""

from __future__ import annotations

import contextlib
from typing import Any

import httpx
import pytest
from documents import BLENDED, QUESTIONS, ask, body, stored_chunks

from app.extensions.blend.precompute.precompute import KNOWN_S
from load_tests.harness.patience import patience
from load_tests.harness.server import RunningServer, ServerError

pytestmark = pytest.mark.server


def test_in_idle_time_documents_are_stored_by_themselves_after_their_prompt_was(server: RunningServer) -> None:
    for order in ((0, 1, 2, 3, 4, 5), (5, 4, 3, 2, 1, 0), (2, 1, 0, 5, 4, 3)):
        asked = body(order, next(iter(QUESTIONS)), "idle", **BLENDED)
        ask(server, asked)
        with contextlib.suppress(ServerError):  # a busy machine may lose a save, and a later prompt looks again
            server.wait_until(lambda: min(stored_chunks(server, asked)) >= 256, "stored", KNOWN_S + 5)  # noqa: B023
            break
    assert min(stored_chunks(server, asked)) >= 256, "each document is stored by itself"


def test_documents_are_filled_by_order_before_anybody_asks(server: RunningServer) -> None:
    asked = body(range(6), next(iter(QUESTIONS)), "ordered", **BLENDED)
    order = {name: asked[name] for name in ("messages", "documents", "cache_salt")}

    def ordered() -> dict[str, Any]:
        answer = httpx.post(f"{server.url}/api/v1/kv/fill", json=order, timeout=patience(60))
        assert answer.status_code == 202, answer.text
        url = server.url + answer.headers["location"]
        server.wait_until(
            lambda: httpx.get(url, timeout=patience(60)).json()["status"] != "running", "the order ends", 60.0
        )
        job: dict[str, Any] = httpx.get(url, timeout=patience(60)).json()
        return job

    # On a busy machine the manager may answer too late for a chunk: the job says so, and another order fills the rest.
    jobs = [ordered()]
    while jobs[-1]["outcome"] == "incomplete" and len(jobs) < 5:
        jobs.append(ordered())
    assert (jobs[-1]["status"], jobs[-1]["outcome"], jobs[-1]["done"]) == ("done", "done", 6), jobs
    assert jobs[0]["filled"] > 0, jobs
    again = ordered()
    assert (again["outcome"], again["done"], again["stored"]) == ("done", 6, 6), again
    assert min(stored_chunks(server, asked)) >= 256, "under the names that blended prompts look for"


@pytest.mark.parametrize(
    ("value", "param"),
    [
        ({"fidelity": "blended", "recompute_ratio": 1.5}, "kv_cache.recompute_ratio"),
        ({"fidelity": "blended", "chunks": "a text"}, "kv_cache.chunks"),
        ({"fidelity": "exact", "chunks": ["a text"]}, "kv_cache.chunks"),
        ({"recompute_ratio": 0.5}, "kv_cache.recompute_ratio"),
    ],
)
def test_what_cannot_be_blended_is_refused(server: RunningServer, value: Any, param: str) -> None:
    asked = {"model": "demo", "prompt": "Anna lives in Oslo.", "max_tokens": 1, "kv_cache": value}
    answer = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=patience(60))

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
