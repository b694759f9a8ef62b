"""A server whose engines have processes of their own: the same tokens, the same faults, and nobody left behind."""

from __future__ import annotations

import asyncio
from random import Random
from typing import Any

import httpx
import psutil
import pytest
from plain_references import TURNS, plain_references, plan

from load_tests.faults.catalogue import ENGINE_FAULTS, FAULTS, Fault, World
from load_tests.faults.trial import Trials
from load_tests.harness.client import Client
from load_tests.harness.conversations import Turn, complete, run
from load_tests.harness.patience import patience
from load_tests.micro.exactness import compare
from tests.sizes import CONVERSATIONS, STREAMED_TOKENS, STREAMS

pytestmark = pytest.mark.server

ENGINE = "VLLM::EngineCore"
DEADLY_TOKENS = [11, 13, 11, 17, 11, 19]


@pytest.fixture(scope="module")
def trials(process_world: World) -> Trials:
    return Trials(process_world, "demo", 3, STREAMS, STREAMED_TOKENS)


def engines(world: World) -> list[psutil.Process]:
    return world.server.processes(ENGINE)


async def asked_again(url: str, turns: list[Turn]) -> list[Turn]:
    """The same requests, one after the other."""
    async with Client(url, "demo", timeout_s=patience(60)) as client:
        return [await complete(client, turn.prompt, len(turn.answer)) for turn in turns]


@pytest.mark.long(
    "tests/end_to_end/replicas/test_keys_and_roles.py::test_answers_that_are_handed_over_are_the_undisturbed_ones"
)
@pytest.mark.long("tests/deployments/engine/process/test_engine_process.py")
def test_conversations_answer_as_plain_vllm_does(process_world: World, pytestconfig: pytest.Config) -> None:
    server = process_world.server
    assert len(engines(process_world)) == 2
    assert pytestconfig.cache is not None
    turns: list[Turn] = []
    for seed, tiers in enumerate((("device",), ("device", "cpu")), 20):
        asked = plan(CONVERSATIONS // 2, seed, tiers)
        turns += asyncio.run(run(server.url, "demo", asked))
    last = turns[TURNS - 1 :: TURNS]
    server.wait_until_idle()
    server.wait_until(lambda: server.segments("redis") >= server.segments("cpu") > 0, "all of it is in Redis", 60.0)

    def without(*tiers: str) -> list[Turn]:
        server.clear(*tiers)
        return asyncio.run(asked_again(server.url, last))

    turns += server.in_time(lambda: without("device"))
    server.wait_until_idle()
    turns += server.in_time(lambda: without("device", "cpu"))
    references = plain_references(turns, server.model_folder, pytestconfig.cache.mkdir("plain-vllm"))
    verdict = compare(turns, references, CONVERSATIONS)

    assert verdict.different_answers == 0
    reused = verdict.prompt_tokens_by_source
    assert min(reused["device"], reused["cpu"], reused["redis"]) > 200, f"too little was reused: {reused}"
    server.wait_until_idle()


@pytest.mark.long("tests/end_to_end/test_faults.py::test_a_fault_costs_no_token_and_no_request_and_the_part_rejoins")
@pytest.mark.long("tests/deployments/engine/process/test_engine_process.py")
@pytest.mark.parametrize("fault", [*FAULTS, *ENGINE_FAULTS], ids=lambda fault: f"{fault.part}: {fault.name}")
def test_a_fault_costs_no_token_and_no_request_and_the_part_rejoins(
    fault: Fault, trials: Trials, process_world: World
) -> None:
    outcome = trials.run(fault)
    assert outcome.problems == []
    process_world.server.wait_until(lambda: len(engines(process_world)) == 2, "no engine outlives its replica", 30.0)


@pytest.mark.long(
    "tests/app/openai/test_poison_registry.py"
    "::test_in_random_worlds_a_deadly_prompt_ends_two_engines_at_most_and_everybody_else_is_answered"
)
@pytest.mark.long(
    "tests/deployments/engine/process/test_engine_process.py"
    "::test_an_engine_that_raises_names_who_was_prefilled_and_says_why"
)
def test_a_deadly_prompt_costs_one_engine_and_nobody_elses_answer(process_world: World) -> None:
    server = process_world.server
    server.wait_until(lambda: server.health()["status"] == "ok", "all is well", 90)
    process_world.inside.do("make_engines_mortal", DEADLY_TOKENS)
    before = {process.pid for process in engines(process_world)}
    draw = Random(1)

    def body(tokens: list[int]) -> dict[str, Any]:
        return {"model": "demo", "prompt": tokens, "max_tokens": 40, "ignore_eos": True}

    def words(count: int) -> list[int]:
        return [draw.randrange(100, 500) for _ in range(count)]

    async def ask() -> tuple[list[httpx.Response], list[int]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=patience(120)) as client:
            computed = server.metric("vllm:prompt_tokens_total")
            fellows = [asyncio.create_task(client.post("/v1/completions", json=body(words(60)))) for _ in range(4)]
            await asyncio.to_thread(
                server.wait_until,
                lambda: server.metric("vllm:prompt_tokens_total") >= computed + 4 * 60,
                "the fellows' prompts are computed",
            )
            deadly = [*words(80), *DEADLY_TOKENS, *words(20)]
            poisoned = [(await client.post("/v1/completions", json=body(deadly))).status_code for _ in range(3)]
            return list(await asyncio.gather(*fellows)), poisoned

    fellows, poisoned = asyncio.run(ask())

    assert [answer.status_code for answer in fellows] == [200] * 4
    assert poisoned == [500, 503, 503]
    server.wait_until(lambda: server.health()["status"] == "ok", "the replica is replaced", 90)
    assert len(before & {process.pid for process in engines(process_world)}) == 1
