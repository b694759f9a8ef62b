"""Many clients, and clients that leave: nobody is lost, and nothing stays behind."""

from __future__ import annotations

import asyncio
from collections import Counter

import httpx
import pytest

from load_tests.harness.patience import patience
from load_tests.harness.server import RunningServer
from tests.sizes import CLIENTS

pytestmark = pytest.mark.server


def test_many_clients_get_an_answer_or_a_429_with_retry_after(server: RunningServer) -> None:
    async def one(client: httpx.AsyncClient, number: int) -> int:
        body = {"model": "demo", "prompt": f"Client {number} says hello.", "max_tokens": 4}
        response = await client.post("/v1/completions", json=body)
        if response.status_code == 429:
            assert int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["code"] == "rate_limit_exceeded"
        return response.status_code

    async def all_at_once() -> Counter[int]:
        limits = httpx.Limits(max_connections=CLIENTS)
        async with httpx.AsyncClient(base_url=server.url, timeout=patience(240), limits=limits) as client:
            return Counter(await asyncio.gather(*(one(client, number) for number in range(CLIENTS))))

    answers = asyncio.run(all_at_once())

    assert answers[200] + answers[429] == CLIENTS, answers
    assert answers[200] >= 64, answers
    server.wait_until_idle()
    server.wait_until(lambda: server.health()["status"] == "ok", "/health is ok")


def test_a_client_that_leaves_mid_stream_frees_its_blocks_and_leases(server: RunningServer) -> None:
    body = {"model": "demo", "prompt": "A long story. " * 30, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    aborted = server.metric("crosskv_aborted_prompts_total")

    with httpx.stream("POST", f"{server.url}/v1/completions", json=body, timeout=patience(60)) as response:
        events = response.iter_lines()
        assert next(events).startswith("data: ")
        assert server.metric("crosskv_prompts_ongoing") == 1

    server.wait_until(lambda: server.metric("crosskv_aborted_prompts_total") > aborted, "the abort is counted")
    server.wait_until_idle()
    assert server.metric("crosskv_prompts_ongoing") == 0
