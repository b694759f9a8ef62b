"""`make demo` against a stand-in for the server: what it shows, and that wrong answers and wrong counts fail."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer
from fake_server import BLOCK, RIGHT_ANSWERS, FakeServer, serve_fake
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

from app.demo import documents, scenes
from app.demo.__main__ import demo
from app.demo.known_kv import KnownKV, TokensBySource
from models.training import phrasing, worlds

ROWS = 11


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with serve_fake() as running:
        yield running


def run(fake: FakeServer, *arguments: str) -> Result:
    app = typer.Typer()
    app.command()(demo)
    return CliRunner().invoke(app, ["--port", fake.url.rsplit(":", 1)[1], *arguments])


def wrong_rows(fake: FakeServer) -> list[str]:
    """The scenes that a run calls wrong; its exit code must say the same."""
    result = run(fake, "--json", "-")
    data = json.loads(result.stdout)
    wrong = [row["scene"] for row in data["rows"] if row["passed"] is False]
    assert result.exit_code == (1 if wrong else 0)
    assert data["passed"] is not bool(wrong)
    return wrong


def test_a_right_server_passes_and_every_row_is_in_the_table(fake):
    result = run(fake)
    assert result.exit_code == 0, result.output
    assert result.output.count("✓") == ROWS + 1
    assert "The red ball is with Nils in Lisbon." in result.output
    assert "all answers and reuse counts are right" in result.output


def test_it_passes_again_on_a_server_that_has_seen_it(fake):
    assert wrong_rows(fake) == []
    assert wrong_rows(fake) == []
    assert len({request["cache_salt"] for request in fake.requests}) == 2


def test_every_tier_is_visited(fake):
    rows = json.loads(run(fake, "--json", "-").stdout)["rows"]
    tokens = {row["scene"]: row["tokens"] for row in rows if row["tokens"]}
    prompt = tokens["cold"]["recomputed"]
    whole = (prompt - 1) // BLOCK * BLOCK
    rest = {"redis": 0, "recomputed": prompt - whole}
    assert tokens["cold"] == {"device": 0, "cpu": 0, "redis": 0, "recomputed": prompt}
    assert tokens["again: device hit"] == {"device": whole, "cpu": 0, **rest}
    assert tokens["another replica: CPU-tier hit"] == {"device": 0, "cpu": whole, **rest}
    assert tokens["devices cleared: CPU-tier hit"] == {"device": 0, "cpu": whole, **rest}
    assert [row["replica"] for row in rows[:4]] == ["0", "0", "1", "0"]


@pytest.mark.parametrize("question", RIGHT_ANSWERS)
def test_a_wrong_answer_fails(fake, question):
    fake.answers[question] = f"{fake.answers[question]} Oscar lives in Paris."
    rows = json.loads(run(fake, "--json", "-").stdout)["rows"]
    assert {row["question"] for row in rows if row["problems"]} == {question}


def test_a_greeting_that_the_model_never_learned_fails(fake):
    fake.greetings = ("The parrot says hello.", *fake.greetings[1:])
    assert wrong_rows(fake)[0] == "same documents, a longer answer"


@pytest.mark.parametrize("number", [0, 2, 5, 8, 10])
def test_a_reuse_count_that_is_wrong_fails(fake, number):
    def shift(request: int, usage: dict[str, Any]) -> None:
        if request == number:
            usage["kv_cache"]["device"] += BLOCK
            usage["kv_cache"]["recomputed"] -= BLOCK
            usage["prompt_tokens_details"]["cached_tokens"] += BLOCK

    fake.tamper = shift
    assert len(wrong_rows(fake)) == 1


def test_counts_that_disagree_with_openais_own_field_fail(fake):
    fake.tamper = lambda number, usage: usage["prompt_tokens_details"].update(cached_tokens=1)
    assert len(wrong_rows(fake)) == ROWS - 1


def test_an_answer_from_another_replica_than_the_pinned_one_fails(fake):
    fake.tamper = lambda number, usage: usage["kv_cache"].update(replica="7")
    assert len(wrong_rows(fake)) == ROWS - 1


def test_a_cpu_tier_that_saves_nothing_fails(fake, monkeypatch):
    monkeypatch.setattr(scenes, "SAVE_DEADLINE_S", 0.05)
    fake.saves = False
    assert "another replica: CPU-tier hit" in wrong_rows(fake)


def test_answers_that_are_not_saved_fail(fake, monkeypatch):
    monkeypatch.setattr(scenes, "SAVE_DEADLINE_S", 0.05)
    fake.saves_answers = False
    assert {"turn two: the answer is reused", "turn two after answer A"} <= set(wrong_rows(fake))


def test_a_clear_that_does_nothing_fails(fake):
    fake.clears = False
    assert "devices cleared: CPU-tier hit" in wrong_rows(fake)


def test_samples_that_are_all_the_same_fail(fake):
    fake.greetings = fake.greetings[:1] * scenes.MOST_SAMPLES
    assert "sampled answer B, same request" in wrong_rows(fake)


def test_one_replica_skips_what_needs_two_and_says_so(fake):
    del fake.devices[1]
    result = run(fake)
    assert result.exit_code == 0, result.output
    assert "skipped: this server runs one replica" in result.output
    assert result.output.count("✓") == ROWS
    assert "1 replica," in result.output


def test_another_model_may_answer_what_it_likes(fake):
    fake.model = "qwen"
    fake.answers = dict.fromkeys(fake.answers, "I do not know. " * BLOCK)
    result = run(fake)
    assert result.exit_code == 0, result.output
    assert "answers were not checked" in result.output
    assert all(request["model"] == "qwen" and request["min_tokens"] > BLOCK for request in fake.requests)


def test_another_models_counts_are_checked(fake):
    fake.model = "qwen"
    fake.clears = False
    assert "devices cleared: CPU-tier hit" in wrong_rows(fake)


def test_a_server_that_is_not_there_is_one_sentence_and_exit_code_2():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = str(unused.getsockname()[1])
        ran = subprocess.run(
            [sys.executable, "-m", "app.demo", "--port", port], capture_output=True, text=True, timeout=60, check=False
        )
    assert ran.returncode == 2
    assert ran.stdout == ""
    assert ran.stderr == (
        f"No server answers at http://127.0.0.1:{port}: start one with `make serve`, or give the --port that it listens"
        " on.\n"
    )


def test_a_server_that_is_not_ready_is_exit_code_2(fake):
    fake.health = 503
    result = run(fake)
    assert result.exit_code == 2
    assert "is not ready (replicas: 2 of 2 missing)" in result.stderr


def test_a_part_that_is_not_well_is_named(fake):
    fake.cpu_tier_state = "missing"
    assert "cpu_tier: missing" in run(fake).stdout


def test_a_server_without_debug_headers_is_one_sentence_and_exit_code_2(fake):
    fake.obeys_pins = False
    result = run(fake)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "http.debug_headers" in result.stderr


def test_an_answer_that_breaks_off_is_one_sentence_and_exit_code_1(fake):
    fake.breaks_off_at = 3
    result = run(fake)
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "broke off" in result.stderr


@given(st.integers(1, 5), st.integers(1, 60), st.integers(1, 60))
def test_the_same_prompt_again_reuses_all_its_blocks_but_the_last_tokens(block, prompt_tokens, answer_tokens):
    known = KnownKV(block)
    prompt, answer = list(range(prompt_tokens)), list(range(100, 100 + answer_tokens))
    assert known.expected(0, prompt) == TokensBySource(recomputed=prompt_tokens)
    known.add_turn(0, prompt, answer)
    whole = (prompt_tokens - 1) // block * block
    assert known.expected(0, prompt) == TokensBySource(device=whole, recomputed=prompt_tokens - whole)
    assert known.expected(1, prompt) == TokensBySource(cpu=whole, recomputed=prompt_tokens - whole)
    known.clear_devices()
    assert known.expected(0, prompt) == TokensBySource(cpu=whole, recomputed=prompt_tokens - whole)


@given(st.integers(1, 5), st.integers(1, 60), st.integers(1, 60))
def test_turn_two_reuses_the_answer_but_for_its_last_token(block, prompt_tokens, answer_tokens):
    known = KnownKV(block)
    prompt, answer = list(range(prompt_tokens)), list(range(100, 100 + answer_tokens))
    known.add_turn(0, prompt, answer)
    following = [*prompt, *answer, 500, 501]
    whole = (prompt_tokens + answer_tokens - 1) // block * block
    assert known.expected(1, following) == TokensBySource(cpu=whole, recomputed=len(following) - whole)


def test_homes_jobs_and_owners_are_none_that_the_model_was_trained_on():
    for name, (city, job, _, _) in documents.FACTS.items():
        assert worlds.is_reserved(name, city.removeprefix(f"{name} lives in ").rstrip("."))
        assert worlds.is_reserved(name, job.removeprefix(f"{name} is a ").rstrip("."))
    for sentence in documents.OWNED:
        thing, owner = sentence.removeprefix("The ").rstrip(".").split(" belongs to ")
        assert worlds.is_reserved(thing, owner)


def test_greetings_are_worded_as_the_model_learned_them():
    assert [f" {reply}" for reply in documents.GREETING_REPLIES] == list(phrasing.GREETING_REPLIES)
