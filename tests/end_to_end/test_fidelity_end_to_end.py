"""Exact and tolerant prompts in a real server: what each is served from, and that exact answers feel nothing of it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from kvmanager.segments.format import EXACT, LOSSY_CODECS
from load_tests.faults.catalogue import World
from load_tests.harness.patience import patience
from load_tests.harness.server import RunningServer

pytestmark = pytest.mark.server

DOCUMENT = " ".join(f"Anna lives in Paris. Ben is a baker. Note {number}." for number in range(40))
QUESTION = [{"role": "system", "content": DOCUMENT}, {"role": "user", "content": "Where does Anna live?"}]
LONG_ANSWER = " ".join(f"Note {number} says that Ben is a baker." for number in range(20))
TOLERANT = {"kv_cache": {"fidelity": "tolerant"}}


def ask(server: RunningServer, messages: list[dict[str, str]], salt: str, **more: Any) -> tuple[str, list[float], Any]:
    """Replica 0's greedy answer, its tokens' log probabilities, and `usage.kv_cache`."""
    body = {
        "model": "demo", "messages": messages, "max_tokens": 40, "temperature": 0, "ignore_eos": True,
        "logprobs": True, "cache_salt": salt, **more,
    }  # fmt: skip
    response = httpx.post(
        f"{server.url}/v1/chat/completions", json=body, headers={"X-CrossKV-Replica": "0"}, timeout=patience(60)
    )
    answer = response.raise_for_status().json()
    server.wait_until_idle()
    (choice,) = answer["choices"]
    logprobs = [token["logprob"] for token in choice["logprobs"]["content"]]
    return choice["message"]["content"], logprobs, answer["usage"]["kv_cache"]


def ask_without_device(server: RunningServer, messages: list[dict[str, str]], salt: str, **more: Any) -> Any:
    """As `ask`, when no replica has any KV."""
    server.clear("device")
    return ask(server, messages, salt, **more)


def ask_redis(server: RunningServer, messages: list[dict[str, str]], salt: str, **more: Any) -> Any:
    """As `ask`, when Redis alone has any KV."""

    def trial() -> Any:
        for _ in range(3):  # what does not come in time is computed
            server.clear("device", "cpu")
            found = ask(server, messages, salt, **more)
            if found[2].get("reason") != "load_failed":
                break
        return found

    return server.in_time(trial)


def test_a_tolerant_turn_comes_from_lossy_kv_and_exact_answers_stay_what_they_were(world: World) -> None:
    server, salt = world.server, "fidelity"
    server.clear("device", "cpu", "redis")
    text, logprobs, cold = ask(server, QUESTION, salt)
    assert (cold["device"], cold["cpu"], cold["redis"], cold["fidelity"]) == (0, 0, 0, "exact")

    server.wait_until(lambda: server.segments("cpu") > 0, "the exact twin is in the CPU tier")
    server.wait_until_idle()
    answer, _, first = server.in_time(lambda: ask_without_device(server, QUESTION, salt, **TOLERANT))
    assert first["fidelity"] == "tolerant"
    assert (first["device"], first["redis"]) == (0, 0)
    assert first["cpu"] > 256, "the exact twin's"
    assert answer == text

    turn = [*QUESTION, {"role": "assistant", "content": LONG_ANSWER}, {"role": "user", "content": "What is Ben?"}]
    server.copy_to_redis(lambda: ask(server, turn, salt, **TOLERANT))
    _, _, second = ask_redis(server, turn, salt, **TOLERANT)
    assert (second["device"], second["cpu"], second["fidelity"]) == (0, 0, "tolerant")
    assert second["redis"] > first["cpu"] + 64, f"the turn's, which no exact prompt has had: {second}"

    again, logprobs_again, warm = ask_redis(server, QUESTION, salt)
    assert (warm["device"], warm["cpu"], warm["fidelity"]) == (0, 0, "exact")
    assert warm["redis"] > 256
    assert again == text
    assert logprobs_again == pytest.approx(logprobs, abs=1e-5)

    headers = list(world.stored_headers().values())
    assert {header.fidelity for header in headers} == {EXACT, "tolerant"}
    assert {header.codec for header in headers if header.fidelity == EXACT} <= {"raw", "lossless"}
    assert LOSSY_CODECS & {header.codec for header in headers if header.fidelity != EXACT}


def test_an_exact_prompt_finds_nothing_where_only_tolerant_ones_were(world: World) -> None:
    server, salt = world.server, "only tolerant"
    ask(server, QUESTION, salt, **TOLERANT)

    _, _, exact = ask(server, QUESTION, salt)
    assert (exact["device"], exact["cpu"], exact["redis"]) == (0, 0, 0)


@pytest.mark.parametrize(
    ("value", "param"),
    [("tolerant", "kv_cache"), ({"fidelity": "lossy"}, "kv_cache.fidelity"), ({"level": 3}, "kv_cache.level")],
)
def test_what_is_no_fidelity_is_refused(server: RunningServer, value: Any, param: str) -> None:
    body = {"model": "demo", "messages": QUESTION, "max_tokens": 1, "kv_cache": value}
    answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=patience(60))

    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
