"""One client's prompt ends engines: one replica is lost for it, everybody else is answered, and /health knows."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import httpx
import pytest

from load_tests.faults.catalogue import World
from load_tests.harness.patience import patience
from load_tests.harness.server import RunningServer

pytestmark = pytest.mark.server

FELLOWS = 6
FELLOW_TOKENS = 60
ANSWER_TOKENS = 48
MODEL = "demo"
DEADLY_TOKENS = [11, 13, 11, 17, 11, 19]
"""A prompt that holds this run of tokens ends the engine that begins it; no other test's does."""


def tokens(seed: int, count: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(100, 500) for _ in range(count)]


def completion(prompt: list[int], **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "prompt": prompt, "max_tokens": ANSWER_TOKENS, "ignore_eos": True, **more}


def replicas(server: RunningServer) -> dict[str, str]:
    """Rank to unique name, of those that the manager knows."""
    return dict(server.stats()["replicas"])


def well(server: RunningServer) -> bool:
    return server.health()["status"] == "ok"


@pytest.mark.long(
    "tests/app/openai/test_poison_registry.py"
    "::test_in_random_worlds_a_deadly_prompt_ends_two_engines_at_most_and_everybody_else_is_answered"
)
@pytest.mark.long("tests/end_to_end/test_faults.py::test_a_fault_costs_no_token_and_no_request_and_the_part_rejoins")
@pytest.mark.long("tests/deployments/replica/test_last_words.py::test_the_process_outlives_its_requests")
def test_a_deadly_prompt_costs_one_replica_and_nobody_elses_answer(world: World, server: RunningServer) -> None:
    server.wait_until(lambda: well(server), "all is well", 90)
    world.inside.do("make_engines_mortal", DEADLY_TOKENS)
    before = set(replicas(server).values())
    poison = [*tokens(1, 80), *DEADLY_TOKENS, *tokens(2, 20)]

    async def run() -> tuple[list[httpx.Response], list[httpx.Response], dict[str, Any]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=patience(120)) as client:

            def send(prompt: list[int], **more: Any) -> asyncio.Task[httpx.Response]:
                return asyncio.create_task(client.post("/v1/completions", json=completion(prompt, **more)))

            computed = server.metric("vllm:prompt_tokens_total")
            fellows = [send(tokens(10 + n, FELLOW_TOKENS)) for n in range(FELLOWS)]

            def all_decode() -> bool:  # what is prefilled in one step with the poison is a suspect too
                return server.metric("vllm:prompt_tokens_total") >= computed + FELLOWS * FELLOW_TOKENS

            await asyncio.to_thread(server.wait_until, all_decode, "the fellows' prompts are computed")
            poisoned = [await send(poison, temperature=0.8, seed=7)]
            health = (await client.get("/health")).json()
            fellows += [send(tokens(30 + n, FELLOW_TOKENS)) for n in range(FELLOWS)]
            # A looping client: the same prompt again and again, under other parameters.
            poisoned += [await send(poison, seed=n) for n in range(4)]
            return list(await asyncio.gather(*fellows)), poisoned, health

    fellows, poisoned, health = asyncio.run(run())

    assert [(a.status_code, a.text[:300]) for a in fellows if a.status_code != 200] == [], (
        health,
        server.stats()["replicas"],
    )
    assert all(answer.json()["usage"]["completion_tokens"] == ANSWER_TOKENS for answer in fellows)
    assert [answer.status_code for answer in poisoned] == [500, 503, 503, 503, 503]
    assert all("ended" in answer.json()["error"]["message"] for answer in poisoned)
    assert health["parts"]["replicas"]["state"] == "1 of 2 missing", "/health knows of the death at once"
    server.wait_until(lambda: well(server), "the replica is replaced", 90)
    assert len(before & set(replicas(server).values())) == len(before) - 1, "the other replica lived through it"
    assert server.metric("crosskv_poison_prompts_total") == 1


def test_a_long_seeded_prompt_beside_others_that_sample_ends_no_engine(server: RunningServer) -> None:
    """Four requests that sample are decoding; one more has a seed and a prompt that is longer than a step."""
    server.wait_until(lambda: well(server), "all is well", 90)
    before = set(replicas(server).values())
    pinned = {"X-CrossKV-Replica": "0"}

    async def run() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=server.url, timeout=patience(120), headers=pinned) as client:

            def send(prompt: list[int], **more: Any) -> asyncio.Task[httpx.Response]:
                return asyncio.create_task(client.post("/v1/completions", json=completion(prompt, **more)))

            fellows = [send(tokens(50 + n, 40), temperature=0.9, max_tokens=400) for n in range(4)]
            await asyncio.sleep(0.5)
            return await asyncio.gather(*fellows, send(tokens(60, 2700), temperature=0.8, seed=7))

    answers = asyncio.run(run())
    assert [answer.status_code for answer in answers] == [200] * 5, [answer.text[:200] for answer in answers]
    assert set(replicas(server).values()) == before
