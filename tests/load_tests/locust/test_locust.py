"""The load test against a small server that behaves and misbehaves as servers do; Locust runs in its own process."""

from __future__ import annotations

import itertools
import json
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from typer.testing import CliRunner

from app.launch.ports import free_port
from configs.model_folder import PROJECT_ROOT
from load_tests.locust import __main__ as load_test
from load_tests.locust.answer import retry_after_s
from load_tests.locust.shapes import SHAPES
from load_tests.measuring.program import EXIT_FELL_SHORT, EXIT_INPUT, EXIT_STOPPED

WORDS = ("Anna", " lives", " in", " Paris.")
RETRY_AFTER_S = 0.5
REFUSAL = "The prompt is too long for the fake."


def event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body)}\n\n"


class FakeOpenAI:
    """An OpenAI-compatible server. `manners` says how it answers the next streamed requests."""

    def __init__(self) -> None:
        self.manners: Iterator[str] = itertools.repeat("well")
        self.asked: list[dict[str, Any]] = []
        self.times: list[float] = []
        routes = [
            Route("/v1/models", lambda _: JSONResponse({"data": [{"id": "fake", "max_model_len": 2000}]})),
            Route("/v1/chat/completions", self.complete, methods=["POST"]),
        ]
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.socket.getsockname()[1]}"
        self.server = uvicorn.Server(uvicorn.Config(Starlette(routes=routes), log_level="error", lifespan="off"))

    async def complete(self, request: Request) -> Response:
        body = await request.json()
        usage = {"prompt_tokens": sum(len(m["content"].split()) for m in body["messages"]), "completion_tokens": 4}
        usage["prompt_tokens_details"] = {"cached_tokens": usage["prompt_tokens"] // 2}
        if not body.get("stream"):
            return JSONResponse({"choices": [], "usage": usage})
        self.asked.append(body)
        self.times.append(time.monotonic())
        manner = next(self.manners)
        if manner == "refuse":
            return JSONResponse({"error": {"message": REFUSAL}}, 400)
        if manner == "busy":
            return JSONResponse({"error": {"message": "Full."}}, 429, {"Retry-After": str(RETRY_AFTER_S)})
        return StreamingResponse(self.stream(manner, usage), media_type="text/event-stream")

    async def stream(self, manner: str, usage: dict[str, Any]) -> AsyncIterator[str]:
        yield event({"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        for word in WORDS:
            yield event({"choices": [{"delta": {"content": word}}]})
        if manner == "error":
            yield event({"error": {"message": "The engine died."}})
        yield event({"choices": [], "usage": usage})
        if manner != "cut":
            yield "data: [DONE]\n\n"


@pytest.fixture
def fake() -> Iterator[FakeOpenAI]:
    server = FakeOpenAI()
    thread = threading.Thread(target=server.server.run, args=([server.socket],), daemon=True)
    thread.start()  # who connects before it runs waits in the socket's queue
    yield server
    server.server.should_exit = True
    thread.join()


def command(url: str, results: Path, *options: str) -> list[str]:
    words = [sys.executable, "-m", "load_tests.locust", "--host", url, "--results", str(results), "--json", "-"]
    return [*words, "--think-s", "0.02", *options]


def load(
    url: str, results: Path, enough: Callable[[dict[str, Any]], bool], *options: str
) -> subprocess.CompletedProcess[str]:
    """A load whose summary is `enough`, a longer one at need: while a machine stands still nothing is answered."""
    for duration in ("2", "10", "60"):
        arguments = command(url, results, "--duration", duration, *options)
        done = subprocess.run(arguments, cwd=PROJECT_ROOT, capture_output=True, text=True)
        if enough(json.loads((results / "summary.json").read_text())):
            break
    return done


def rows(results: Path) -> dict[tuple[str, str], dict[str, int]]:
    """Locust's, by type and name."""
    return {(row["method"], row["name"]): row for row in json.loads((results / "stats.json").read_text())}


def test_users_converse_and_ttft_and_tpot_are_rows_of_their_own(fake: FakeOpenAI, tmp_path: Path) -> None:
    def enough(summary: dict[str, Any]) -> bool:
        """Some turns of each user: their second ones return."""
        return all(
            summary["classes"].get(kind, {"requests": 0})["requests"] >= 3 for kind in ("chat", "documents", "cold")
        )

    done = load(fake.url, tmp_path, enough, "--users", "3")
    assert done.returncode == 0, done.stderr
    summary, found = json.loads(done.stdout), rows(tmp_path)
    for kind in ("chat", "documents", "cold"):
        figures, requests = summary["classes"][kind], found["POST", kind]["num_requests"]
        times = [row for (type_, name), row in found.items() if type_ == "TTFT" and name.startswith(kind)]
        assert figures["requests"] == requests == sum(row["num_requests"] for row in times) > 0
        assert found["TPOT", kind]["num_requests"] == requests
        assert figures["output_tokens"] == requests * len(WORDS)
        assert figures["cached_share"] == pytest.approx(0.5, abs=0.02)
        assert figures["ttft_s"]["p50"] > figures["tpot_s"]["p50"] > 0
        assert (("TTFT", f"{kind}, returning") in found) == (kind != "cold")
    assert summary["all"]["failures"] == 0
    assert (tmp_path / "report.html").exists()

    longest = max((body["messages"] for body in fake.asked), key=len)
    assert {m["content"] for m in longest if m["role"] == "assistant"} == {"".join(WORDS)}
    assert any(body["messages"] == longest[:-2] for body in fake.asked)  # the turn before
    assert max(sum(len(m["content"].split()) for m in body["messages"]) for body in fake.asked) < 2000


def test_every_way_to_fail_counts_under_its_message_and_429_is_waited_for_and_no_failure(
    fake: FakeOpenAI, tmp_path: Path
) -> None:
    fake.manners = itertools.cycle(("busy", "well", "refuse", "error", "cut"))

    def enough(summary: dict[str, Any]) -> bool:
        of_all = summary["all"]
        return len(summary["errors"]) == 3 and of_all["requests"] > of_all["failures"] and of_all["turned_away"] > 0

    done = load(fake.url, tmp_path, enough, "--users", "3", "--classes", "chat")
    assert done.returncode == EXIT_FELL_SHORT
    assert "failed; --max-error-rate allows 1.0%" in done.stderr
    summary, found = json.loads(done.stdout), rows(tmp_path)
    assert summary["errors"].keys() == {
        f"HTTP 400: {REFUSAL}",
        "error in the stream: The engine died.",
        "the stream ended without [DONE]",
    }
    figures = summary["all"]
    assert sum(summary["errors"].values()) == figures["failures"] < figures["requests"]
    assert found["POST", "chat"]["num_failures"] == figures["failures"]

    assert figures["turned_away"] == found["429", "chat"]["num_requests"] > 0
    again = fake.asked.index(fake.asked[0], 1)
    assert fake.times[again] - fake.times[0] >= RETRY_AFTER_S


def test_an_interrupted_run_keeps_what_it_has(fake: FakeOpenAI, tmp_path: Path) -> None:
    arguments = command(fake.url, tmp_path, "--users", "1", "--duration", "100")
    with subprocess.Popen(
        arguments, cwd=PROJECT_ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        while not (tmp_path / "summary.json").exists() or len(fake.asked) < 3:
            time.sleep(0.05)
            assert running.poll() is None
        running.send_signal(signal.SIGINT)
        output, words = running.communicate()
    assert running.returncode == EXIT_STOPPED, words
    assert json.loads(output)["all"]["requests"] >= 3
    assert "Interrupted:" in words
    assert (tmp_path / "report.html").exists()


def refused(*options: str) -> str:
    """The one sentence of a load test that cannot begin."""
    app = typer.Typer()
    app.command()(load_test.main)
    result = CliRunner().invoke(app, list(options))
    assert result.exit_code == EXIT_INPUT
    (line,) = result.stderr.splitlines()
    return line


def test_a_server_that_is_not_there_is_named(tmp_path: Path) -> None:
    url = f"http://127.0.0.1:{free_port()}"
    assert f"No server answers at {url}" in refused("--host", url, "--results", str(tmp_path))


def test_a_model_that_the_server_lacks_is_named_with_those_that_it_has(fake: FakeOpenAI, tmp_path: Path) -> None:
    line = refused("--host", f"{fake.url}/v1", "--model", "absent", "--results", str(tmp_path))
    assert line == f"{fake.url} does not have the model 'absent'; it has 'fake'."


def test_what_cannot_be_used_is_said_before_the_load(fake: FakeOpenAI, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    assert f"{file / 'results'} cannot be written to" in refused("--host", fake.url, "--results", f"{file}/results")
    assert "no class 'hot'" in refused("--host", fake.url, "--results", str(tmp_path), "--classes", "chat,hot")
    assert fake.asked == []


def test_locust_by_itself_ends_with_a_sentence_when_it_cannot_have_the_model(fake: FakeOpenAI) -> None:
    words = (
        "-m",
        "locust",
        "-f",
        "load_tests/locust/locustfile.py",
        "--headless",
        "--host",
        fake.url,
        "--model",
        "absent",
    )
    done = subprocess.run([sys.executable, *words], cwd=PROJECT_ROOT, capture_output=True, text=True)
    assert done.returncode == EXIT_INPUT
    assert "does not have the model 'absent'" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("name", "users"), [("steady", [10] * 5), ("staircase", [2, 4, 6, 8, 10]), ("spike", [2, 2, 10, 2, 2])]
)
def test_shapes_reach_all_users_at_their_highest(name: str, users: list[int]) -> None:
    shape: Callable[[int, float], int] = SHAPES[name]
    assert [shape(10, share) for share in (0.1, 0.3, 0.5, 0.7, 0.9)] == users
    assert shape(1, 0.0) == 1


def test_retry_after_is_seconds_or_a_date() -> None:
    assert retry_after_s("7") == 7.0
    assert retry_after_s("Wed, 21 Oct 2015 07:28:00 GMT") == 0.0
    assert retry_after_s("soon") is None
    assert retry_after_s(None) is None
