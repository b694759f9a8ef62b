"""What a user sees: the official client works, tiers and tenants are what the API says."""

from __future__ import annotations

import asyncio
import itertools

import httpx
import pytest
from openai import OpenAI

from load_tests.faults.catalogue import World
from load_tests.harness.client import Client
from load_tests.harness.conversations import complete
from load_tests.harness.engine import prompt
from load_tests.harness.patience import patience
from load_tests.harness.server import RunningServer

pytestmark = pytest.mark.server

BLOCK_TOKENS = 32
"""vLLM's on a CPU."""
DOCUMENT = " ".join(f"Anna lives in Paris. Ben is a baker. Note {number}." for number in range(40))


def ask(server: RunningServer, pin: int | None, salt: str, stream: bool = False) -> dict[str, int]:
    client = OpenAI(base_url=f"{server.url}/v1", api_key="none")
    options: dict[str, object] = {
        "model": "demo",
        "messages": [{"role": "system", "content": DOCUMENT}, {"role": "user", "content": "Where does Anna live?"}],
        "max_tokens": 40,
        "temperature": 0,
        "extra_body": {"cache_salt": salt, "ignore_eos": True},
        "extra_headers": {} if pin is None else {"X-CrossKV-Replica": str(pin)},
    }
    if stream:
        chunks = list(
            client.chat.completions.create(**options, stream=True, stream_options={"include_usage": True})  # type: ignore[call-overload]
        )
        usage = chunks[-1].usage
    else:
        usage = client.chat.completions.create(**options).usage  # type: ignore[call-overload]
    kv = usage.kv_cache
    assert kv["device"] + kv["cpu"] + kv["redis"] + kv["recomputed"] == usage.prompt_tokens
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - kv["recomputed"]
    return dict(kv)


@pytest.mark.parametrize("stream", [False, True])
def test_what_one_replica_computed_the_other_loads(server: RunningServer, stream: bool) -> None:
    salt = f"cross-{stream}"
    before = server.segments("cpu")

    def elsewhere() -> dict[str, int]:
        server.clear("device")
        return ask(server, 1, salt, stream)

    cold = ask(server, 0, salt, stream)
    server.wait_until(lambda: server.segments("cpu") > before, "the prompt is in the CPU tier")
    server.wait_until_idle()
    warm = ask(server, 0, salt, stream)
    crossed = server.in_time(elsewhere)

    assert (cold["device"], cold["cpu"], cold["replica"]) == (0, 0, "0")
    assert warm["device"] > 256
    assert (crossed["device"], crossed["cpu"], crossed["replica"]) == (0, warm["device"], "1")


def test_replicas_are_called_over_grpc(server: RunningServer) -> None:
    """Ray writes the method that an actor carries out into its process's title; gRPC's calls are none."""
    body = {"model": "demo", "prompt": "Anna", "max_tokens": 200, "ignore_eos": True, "stream": True}
    with httpx.stream(
        "POST", f"{server.url}/v1/completions", json=body, timeout=patience(60), trust_env=False
    ) as answer:
        assert next(answer.iter_lines()).startswith("data:")
        titles = [" ".join(process.cmdline()) for process in server.processes("ray::ServeReplica:crosskv:Replica")]
    assert titles
    assert [title for title in titles if "handle_request" in title] == []


@pytest.mark.parametrize(
    "length",
    [
        333,
        pytest.param(
            500,
            marks=pytest.mark.long(
                "tests/end_to_end/test_reuse.py::test_a_question_about_a_stored_document_computes_itself_and_one_block"
            ),
        ),
        1011,
    ],
)
def test_a_question_about_a_stored_document_computes_itself_and_one_block(server: RunningServer, length: int) -> None:
    """Wherever the document's length falls, and whichever replica is asked."""
    question, trials = 50, itertools.count(7000 + 10 * length)

    async def ask_about(document: list[int], number: int) -> int:
        async with Client(server.url, "demo", timeout_s=patience(120)) as client:
            turn = await complete(client, document + prompt(8000 + number, question), 8, pin=number % 2)
            return int(turn.kv_cache["recomputed"])

    def conversation() -> list[int]:
        document, recomputed = prompt(next(trials), length), []
        for number in range(4):
            before = server.segments("cpu")
            recomputed.append(asyncio.run(ask_about(document, number)))
            server.wait_until(lambda: server.segments("cpu") > before, "what is new is in the CPU tier")  # noqa: B023
            server.wait_until_idle()
        return recomputed

    first, *later = server.in_time(conversation)

    assert first == length + question
    assert max(later) <= question + BLOCK_TOKENS, later


def test_each_cleared_tier_leaves_the_slower_ones_and_clearing_all_leaves_nothing(server: RunningServer) -> None:
    server.clear("device", "cpu", "redis")
    server.copy_to_redis(lambda: ask(server, 0, "clear"))
    assert server.segments("redis") > 1

    def without(*tiers: str) -> dict[str, int]:
        server.clear(*tiers)
        kv = ask(server, 0, "clear")
        server.wait_until_idle()
        return kv

    loaded = server.in_time(lambda: without("device"))
    from_redis = server.in_time(lambda: without("device", "cpu"))
    recomputed = without("redis", "cpu", "device")

    assert loaded["device"] == 0
    assert loaded["cpu"] > 256
    assert (from_redis["device"], from_redis["cpu"], from_redis["redis"]) == (0, 0, loaded["cpu"])
    assert recomputed["device"] == recomputed["cpu"] == recomputed["redis"] == 0


def test_a_different_cache_salt_sees_nothing(server: RunningServer) -> None:
    ask(server, 0, "mine")
    server.wait_until_idle()

    others = ask(server, 0, "yours")

    assert others["device"] == others["cpu"] == others["redis"] == 0


def test_unpinned_requests_follow_their_prefix(server: RunningServer) -> None:
    server.clear("device", "cpu", "redis")
    home = ask(server, 1, "affinity")["replica"]
    server.wait_until(lambda: server.segments("cpu") > 0, "the manager has heard of the prompt")
    server.wait_until_idle()

    replicas = {ask(server, None, "affinity")["replica"] for _ in range(4)}

    assert replicas == {home}


def test_stats_add_up(server: RunningServer, world: World) -> None:
    ask(server, 0, "stats")
    server.wait_until_idle()

    def add_up() -> bool:
        stats = server.stats()
        books = {location["tier"]: location for location in stats["locations"]}
        (tier,) = stats["cpu_tiers"].values()
        booked = [(books[name]["segments"], books[name]["bytes"]) for name in ("cpu", "redis")]
        there = [(tier["segments"], tier["used_bytes"]), (len(world.redis.segment_keys()), world.redis.segment_bytes())]
        open_rooms = books["cpu"]["reserved_bytes"] + books["redis"]["reserved_bytes"]
        return booked == there and all(segments > 0 for segments, _ in there) and not open_rooms

    server.wait_until(add_up, "the manager's books say what the tiers hold")


def test_a_conversation_with_sampled_answers_computes_what_is_new(server: RunningServer) -> None:
    """At temperature 1 the tokenizer would cut many of these answers otherwise than they were sampled."""
    no_special_tokens = {str(token): -100 for token in range(7)}
    messages: list[dict[str, str]] = []
    known: list[int] = []
    for number in range(4):
        messages.append({"role": "user", "content": f"{'Anna lives in Oslo. ' * 20} Who is number {number}?"})
        body = {
            "model": "demo", "messages": messages, "max_tokens": 48, "min_tokens": 48, "temperature": 1.0,
            "seed": number, "logit_bias": no_special_tokens, "cache_salt": "sampled", "return_token_ids": True,
        }  # fmt: skip
        answer = httpx.post(
            f"{server.url}/v1/chat/completions", json=body, headers={"X-CrossKV-Replica": "0"}, timeout=patience(120)
        ).json()
        (choice,) = answer["choices"]
        prompt = answer["prompt_token_ids"]
        assert prompt[: len(known)] == known
        assert answer["usage"]["kv_cache"]["recomputed"] <= len(prompt) - len(known) + 32
        known = [*prompt, *choice["token_ids"]]
        messages.append({"role": "assistant", "content": choice["message"]["content"]})
    assert server.metric("crosskv_answers_returned_total", outcome="spliced") > 0
