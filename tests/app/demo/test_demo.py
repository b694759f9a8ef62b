"""`make demo` against a stand-in for the server: what it shows, and that wrong answers and wrong counts fail."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
from fake_server import BLOCK, RIGHT_ANSWERS, FakeServer, serve_fake
from typer.testing import CliRunner, Result

from app.demo import redis_scenes, restart, scenes, stage
from app.demo.__main__ import demo
from app.launch import run_folder
from configs.model_folder import PROJECT_ROOT

ROWS = 13
"""Without the one that needs a launcher."""
FROM_REDIS = "devices and CPU tier cleared: Redis hit"
PROMOTED = "another replica: promoted to the CPU tier"
RESTARTED = "whole server restarted: Redis hit"

# What a launcher is for the demo: a process of that name that restarts the server on SIGHUP.
LAUNCHER = """
import os, signal, sys, time, urllib.request
signal.signal(signal.SIGHUP, lambda *_: urllib.request.urlopen(sys.argv[2] + "/restart", data=b"{}"))
from app.launch import run_folder
from pathlib import Path
run_folder.RUN_FOLDER = Path(sys.argv[3])
with run_folder.launched_from_here(int(sys.argv[2].rsplit(":", 1)[1])):
    print("ready", flush=True)
    while True:
        time.sleep(0.01)
"""


@pytest.fixture
def fake() -> Iterator[FakeServer]:
    with serve_fake() as running:
        yield running


@pytest.fixture(autouse=True)
def runs(tmp_path, monkeypatch) -> Path:
    """A folder for the run folders, so that no launcher of this machine is found."""
    monkeypatch.setattr(run_folder, "RUN_FOLDER", tmp_path)
    monkeypatch.setattr(restart, "_POLL_S", 0.01)
    return tmp_path


@pytest.fixture
def launcher(fake, runs) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", LAUNCHER, "app.launch", fake.url, str(runs)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=PROJECT_ROOT) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        yield process
        process.kill()


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


@pytest.mark.parametrize("number", [0, 2, 5, 8, 10, 11])
def test_a_reuse_count_that_is_wrong_fails(fake, number):
    def shift(request: int, usage: dict[str, Any]) -> None:
        if request == number:
            usage["kv_cache"]["device"] += BLOCK
            usage["kv_cache"]["recomputed"] -= BLOCK
            usage["prompt_tokens_details"]["cached_tokens"] += BLOCK

    fake.tamper = shift
    assert len(wrong_rows(fake)) == 1


@pytest.mark.parametrize(("reason", "wrong"), [("recompute_faster", 0), ("cold", 1)])
def test_a_turn_that_the_server_would_rather_compute_is_said_and_is_no_fault(fake, reason: str, wrong: int):
    def compute(request: int, usage: dict[str, Any]) -> None:
        if request == 3:  # from the CPU tier, once the devices are cleared
            kv = usage["kv_cache"]
            kv.update(recomputed=kv["recomputed"] + kv["cpu"], cpu=0, reason=reason)
            usage["prompt_tokens_details"]["cached_tokens"] = kv["device"]

    fake.tamper = compute
    rows = json.loads(run(fake, "--json", "-").stdout)["rows"]
    assert sum(bool(row["problems"]) for row in rows) == wrong
    assert sum(stage.COMPUTED_SOONER in row["notes"] for row in rows) == 1 - wrong


def test_counts_that_disagree_with_openais_own_field_fail(fake):
    fake.tamper = lambda number, usage: usage["prompt_tokens_details"].update(cached_tokens=1)
    assert len(wrong_rows(fake)) == ROWS - 1


def test_an_answer_from_another_replica_than_the_pinned_one_fails(fake):
    fake.tamper = lambda number, usage: usage["kv_cache"].update(replica="7")
    assert len(wrong_rows(fake)) == ROWS - 1


def test_a_cpu_tier_that_saves_nothing_fails(fake, monkeypatch):
    monkeypatch.setattr(stage, "SAVE_DEADLINE_S", 0.05)
    monkeypatch.setattr(redis_scenes, "COPY_DEADLINE_S", 0.05)
    fake.saves = False
    assert "another replica: CPU-tier hit" in wrong_rows(fake)


def test_answers_that_are_not_saved_fail(fake, monkeypatch):
    monkeypatch.setattr(stage, "SAVE_DEADLINE_S", 0.05)
    monkeypatch.setattr(redis_scenes, "COPY_DEADLINE_S", 0.05)
    fake.saves_answers = False
    assert {"turn two: the answer is reused", "turn two after answer A"} <= set(wrong_rows(fake))


def test_a_clear_that_does_nothing_fails(fake):
    fake.clears = ("cpu",)
    assert "devices cleared: CPU-tier hit" in wrong_rows(fake)


def test_a_conversation_comes_back_from_redis_and_is_promoted(fake):
    rows = json.loads(run(fake, "--json", "-").stdout)["rows"]
    of = {row["scene"]: row for row in rows}
    tokens = of[FROM_REDIS]["tokens"]
    whole = (sum(tokens.values()) - 1) // BLOCK * BLOCK
    assert (tokens["device"], tokens["cpu"], tokens["redis"]) == (0, 0, whole)
    assert whole > of["cold"]["tokens"]["recomputed"]
    tokens = of[PROMOTED]["tokens"]
    assert (tokens["device"], tokens["cpu"], tokens["redis"]) == (0, whole, 0)
    assert (of[FROM_REDIS]["replica"], of[PROMOTED]["replica"]) == ("0", "1")


def test_a_redis_that_gets_nothing_fails(fake, monkeypatch):
    monkeypatch.setattr(redis_scenes, "COPY_DEADLINE_S", 0.05)
    fake.copies = False
    assert wrong_rows(fake) == [FROM_REDIS]


def test_a_cpu_tier_that_is_not_cleared_fails(fake, monkeypatch):
    monkeypatch.setattr(redis_scenes, "CLEAR_DEADLINE_S", 0.05)
    fake.clears = ("device",)
    assert wrong_rows(fake) == [FROM_REDIS]


def test_kv_that_is_not_promoted_fails(fake, monkeypatch):
    monkeypatch.setattr(stage, "SAVE_DEADLINE_S", 0.05)
    fake.promotes = False
    assert wrong_rows(fake) == [PROMOTED]


@pytest.mark.parametrize(
    ("state", "says"),
    [(None, "this server uses none"), ("running with two tiers: Redis refuses", "running with two tiers")],
)
def test_without_a_redis_its_scenes_are_left_out_with_the_reason(fake, launcher, state, says):
    fake.redis_state = state
    rows = json.loads(run(fake, "--json", "-").stdout)["rows"]
    assert [row["passed"] for row in rows] == [True] * (ROWS - 2) + [None]
    assert says in rows[-1]["notes"][0]
    result = run(fake)
    assert result.exit_code == 0
    assert result.output.count("✓") == ROWS - 1
    assert fake.restarts == 0


def test_after_a_restart_the_conversation_comes_from_redis(fake, launcher):
    result = run(fake, "--json", "-")
    rows = json.loads(result.stdout)["rows"]
    assert result.exit_code == 0
    assert (fake.restarts, fake.probes_refused, fake.lookups_unindexed) == (1, 0, 0)
    assert len(rows) == ROWS + 1
    assert rows[-1]["scene"] == RESTARTED
    assert rows[-1]["tokens"] == rows[-3]["tokens"] == rows[-1]["expected"]
    assert rows[-1]["tokens"]["redis"] > 0


def test_without_a_launcher_the_restart_is_left_out_with_the_reason(fake):
    result = run(fake, "--json", "-")
    assert result.exit_code == 0
    row = json.loads(result.stdout)["rows"][-1]
    assert (row["scene"], row["passed"]) == (RESTARTED, None)
    assert "no `make serve` of this folder runs a server at 127.0.0.1:" in row["notes"][0]


def test_no_restart_means_none(fake, launcher):
    result = run(fake, "--no-restart", "--json", "-")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["rows"][-1]["notes"] == ["left out: --no-restart was given"]
    assert fake.restarts == 0


def test_a_launcher_that_does_not_end_its_server_fails(fake, launcher, monkeypatch):
    monkeypatch.setattr(restart, "STOP_DEADLINE_S", 0.3)
    fake.ends = False
    assert wrong_rows(fake) == [RESTARTED]


def test_a_launcher_that_dies_of_the_restart_fails(fake, launcher):
    fake.probes_refused = 10**6
    threading.Thread(target=_kill_after_restart, args=(fake, launcher), daemon=True).start()
    assert wrong_rows(fake) == [RESTARTED]


def _kill_after_restart(fake: FakeServer, launcher: subprocess.Popen[str]) -> None:
    while not fake.restarts:
        time.sleep(0.01)
    launcher.kill()


def test_a_replica_that_does_not_come_back_fails(fake, launcher, monkeypatch):
    monkeypatch.setattr(restart, "START_DEADLINE_S", 1.0)
    fake.replicas_come_back = False
    assert wrong_rows(fake) == [RESTARTED]


def test_a_redis_that_forgets_at_the_restart_fails(fake, launcher, monkeypatch):
    monkeypatch.setattr(redis_scenes, "INDEX_DEADLINE_S", 0.3)
    fake.forgets_redis = True
    assert wrong_rows(fake) == [RESTARTED]


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
    fake.clears = ("cpu",)
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


def test_a_server_without_an_ingress_is_not_ready_either(fake):
    fake.has_ingress = False
    result = run(fake)
    assert result.exit_code == 2
    assert "is not ready; try again later" in result.stderr


def test_a_part_that_is_not_well_is_named(fake):
    fake.cpu_tier_state = "missing"
    assert "cpu_tier: missing" in run(fake).stdout


def test_a_server_without_debug_headers_is_one_sentence_and_exit_code_2(fake):
    fake.obeys_pins = False
    result = run(fake)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "http.debug_headers" in result.stderr


def test_a_key_that_is_no_administrators_is_one_sentence_and_exit_code_2(fake):
    fake.shows_parts = False
    result = run(fake)
    assert result.exit_code == 2
    assert result.stderr.count("\n") == 1
    assert "admin: true" in result.stderr


def test_an_answer_that_breaks_off_is_one_sentence_and_exit_code_1(fake):
    fake.breaks_off_at = 3
    result = run(fake)
    assert result.exit_code == 1
    assert result.stderr.count("\n") == 1
    assert "broke off" in result.stderr
