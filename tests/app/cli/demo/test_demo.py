"""`crosskv demo` against a stand-in for the server: what it shows, and that wrong answers and wrong counts fail."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from fake_server import BLOCK, RIGHT_ANSWERS, FakeServer, serve_fake
from typer.testing import CliRunner, Result

from app.cli.__main__ import app
from app.cli.demo import turns

COLD, AGAIN, ACROSS = "cold", "again: device hit", "another replica: CPU-tier hit"
CLEARED, NEXT = "devices cleared: CPU-tier hit", "next turn: the answer is reused"
FROM_REDIS = "devices and CPU tier cleared: Redis hit"
PREFETCHED = "another replica: what Redis brought is in the CPU tier"
ROWS = 8


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with serve_fake() as running:
        yield running


def run(fake: FakeServer, *arguments: str) -> Result:
    return CliRunner().invoke(app, ["demo", "--url", fake.url, *arguments])


def rows(fake: FakeServer) -> list[dict[str, Any]]:
    """The rows of a run, whose exit code says the same."""
    result = run(fake, "--json")
    data = json.loads(result.stdout)
    assert data["passed"] is all(row["passed"] is not False for row in data["rows"])
    assert result.exit_code == (0 if data["passed"] else 1)
    return list(data["rows"])


def wrong(fake: FakeServer) -> list[str]:
    """The scenes that a run calls wrong."""
    return [row["scene"] for row in rows(fake) if row["passed"] is False]


def test_a_right_server_passes_and_every_row_is_shown(fake):
    result = run(fake)
    assert result.exit_code == 0, result.output
    assert result.output.count("✓") == ROWS + 1
    assert "The red ball is with Nils in Lisbon." in result.output
    assert "all answers and reuse counts are right" in result.output


def test_it_passes_again_on_a_server_that_has_seen_it(fake):
    assert (wrong(fake), wrong(fake)) == ([], [])
    assert len({request["cache_salt"] for request in fake.requests}) == 2


def test_every_tier_is_visited(fake):
    of = {row["scene"]: row for row in rows(fake)}
    prompt = of[COLD]["tokens"]["recomputed"]
    whole = (prompt - 1) // BLOCK * BLOCK
    none = {"device": 0, "cpu": 0, "redis": 0, "recomputed": prompt - whole}
    assert of[COLD]["tokens"] == {**none, "recomputed": prompt}
    assert of[AGAIN]["tokens"] == {**none, "device": whole}
    assert of[ACROSS]["tokens"] == of[CLEARED]["tokens"] == {**none, "cpu": whole}
    assert [of[scene]["replica"] for scene in (COLD, AGAIN, ACROSS, CLEARED)] == ["0", "0", "1", "0"]
    conversation = of[NEXT]["to_reuse"]
    assert conversation > prompt, "of the last answer too"
    tokens = of[FROM_REDIS]["tokens"]
    whole = (sum(tokens.values()) - 1) // BLOCK * BLOCK
    assert (tokens["device"], tokens["cpu"], tokens["redis"]) == (0, 0, whole)
    tokens = of[PREFETCHED]["tokens"]
    assert (tokens["device"], tokens["cpu"], tokens["redis"]) == (0, whole, 0)
    assert (of[FROM_REDIS]["replica"], of[PREFETCHED]["replica"]) == ("0", "1")


@pytest.mark.parametrize("question", RIGHT_ANSWERS)
def test_a_wrong_answer_fails(fake, question):
    fake.answers[question] = f"{fake.answers[question]} Oscar lives in Paris."
    assert {row["question"] for row in rows(fake) if row["problems"]} == {question}


def test_a_greeting_that_the_model_never_learned_fails(fake):
    fake.greeting = "The parrot says hello. " * BLOCK
    assert wrong(fake) == ["same documents, a longer answer"]


@pytest.mark.parametrize("number", range(ROWS))
def test_a_reuse_count_that_is_wrong_fails(fake, number):
    def shift(request: int, usage: dict[str, Any]) -> None:
        if request == number:
            usage["kv_cache"]["device"] += BLOCK
            usage["kv_cache"]["recomputed"] -= BLOCK
            usage["prompt_tokens_details"]["cached_tokens"] += BLOCK

    fake.tamper = shift
    assert [row["scene"] for row in rows(fake) if row["problems"]] == [rows(fake)[number]["scene"]]


@pytest.mark.parametrize(("reason", "problems"), [("recompute_faster", 0), ("cold", 1)])
def test_a_turn_that_the_server_would_rather_compute_is_said_and_is_no_fault(fake, reason, problems):
    def compute(request: int, usage: dict[str, Any]) -> None:
        if request == 3:  # from the CPU tier, once the devices are cleared
            kv = usage["kv_cache"]
            kv.update(recomputed=kv["recomputed"] + kv["cpu"], cpu=0, reason=reason)
            usage["prompt_tokens_details"]["cached_tokens"] = kv["device"]

    fake.tamper = compute
    found = rows(fake)
    assert sum(bool(row["problems"]) for row in found) == problems
    assert sum(turns.COMPUTED_SOONER in row["notes"] for row in found) == 1 - problems


@pytest.mark.parametrize(
    "tamper",
    [
        lambda number, usage: usage["prompt_tokens_details"].update(cached_tokens=1),
        lambda number, usage: usage["kv_cache"].update(replica="7"),
    ],
    ids=["OpenAI's own field disagrees", "another replica than the pinned one"],
)
def test_a_usage_that_is_wrong_fails(fake, tamper):
    fake.tamper = tamper
    assert len(wrong(fake)) == ROWS


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ({"saves": False}, "CPU tier has not got all"),
        ({"saves_answers": False}, "CPU tier has not got all"),
        ({"copies": False}, "Redis has not got all"),
        ({"clears": ("device",)}, "CPU tier was cleared, and is not empty"),
        ({"promotes": False}, "CPU tier has not got all"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_never_comes_is_one_sentence_and_exit_code_1(fake, monkeypatch, broken, says):
    monkeypatch.setattr(turns, "WAIT_S", 0.05)
    for name, value in broken.items():
        setattr(fake, name, value)
    result = run(fake)
    assert result.exit_code == 1, result.output
    assert result.stderr.count("\n") == 1
    assert says in result.stderr


def test_a_device_that_is_not_cleared_fails(fake):
    fake.clears = ("cpu",)
    assert CLEARED in wrong(fake)


@pytest.mark.parametrize(
    ("state", "says"),
    [(None, "this server uses none"), ("running with two tiers: Redis refuses", "running with two tiers")],
)
def test_without_a_redis_its_rows_are_left_out_with_the_reason(fake, state, says):
    fake.redis_state = state
    found = rows(fake)
    assert [row["passed"] for row in found] == [True] * (ROWS - 2) + [None]
    assert says in found[-1]["notes"][0]


def test_one_replica_leaves_out_what_needs_two_and_says_so(fake):
    del fake.devices[1]
    result = run(fake)
    assert result.exit_code == 0, result.output
    assert "left out: this server runs one replica" in result.output
    assert result.output.count("✓") == ROWS


def test_another_model_may_answer_what_it_likes_and_its_counts_are_checked(fake):
    fake.model = "qwen"
    fake.answers = dict.fromkeys(fake.answers, "I do not know. " * BLOCK)
    assert wrong(fake) == []
    assert all(request["model"] == "qwen" and request["min_tokens"] > BLOCK for request in fake.requests)
    fake.clears = ("cpu",)
    assert CLEARED in wrong(fake)


@pytest.mark.parametrize(
    ("broken", "says"),
    [
        ({"health": 503}, "is not ready (replicas: 2 of 2 missing)"),
        ({"has_ingress": False}, "no ingress answers yet"),
        ({"shows_parts": False}, "admin: true"),
        ({"breaks_off_at": 3}, "broke off"),
    ],
)
def test_a_server_that_cannot_be_shown_is_one_sentence_and_exit_code_2(fake, broken, says):
    for name, value in broken.items():
        setattr(fake, name, value)
    result = run(fake)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert says in result.stderr


def test_a_server_that_obeys_no_pin_says_of_whom_it_would(fake):
    fake.obeys_pins = False
    result = run(fake)
    assert result.exit_code == 1
    assert "obeyed of administrators" in result.stderr


def test_a_part_that_is_not_well_is_named(fake):
    fake.cpu_tier_state = "missing"
    assert "cpu_tier: missing" in run(fake).stdout
