"""A server of any arm as a process: started, ready when it has answered a first prompt, ended with all it started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
from prometheus_client.parser import text_string_to_metric_families

from app.launch.descendants import Descendants
from configs.model_folder import PROJECT_ROOT
from load_tests.harness.client import ServerError

READY_POLL_S = 0.5
STOP_S = 90.0
CHUNK_TOKENS = "crosskv_chunk_tokens_total"
_LAST_LINES = 12


@dataclass(frozen=True)
class BenchServer:
    """`process` is what was started; everything of the server is that or below it."""

    url: str
    process: psutil.Process
    log: Path


@dataclass(frozen=True)
class ChunkTokens:
    """Tokens in chunks of blended prompts, and those that were stored when the prompt was planned.

    With `blending.fill: first` that is after its unknown chunks were computed.
    """

    asked: float
    found: float

    def hit_rate_since(self, before: ChunkTokens) -> float | None:
        """Found over asked; None where nothing was asked."""
        asked = self.asked - before.asked
        return (self.found - before.found) / asked if asked else None


@contextlib.contextmanager
def running(command: Sequence[str], url: str, model: str, log: Path, start_s: float) -> Iterator[BenchServer]:
    """Start `command` and wait until it answers; end it on leaving. What it prints goes to `log`.

    Raises ServerError, with the end of the log, when it ends by itself or is not ready within `start_s` seconds.
    """
    with log.open("w", encoding="utf-8") as out:
        child = subprocess.Popen(
            list(command),
            cwd=PROJECT_ROOT,
            env=os.environ | {"RAY_worker_register_timeout_seconds": str(int(start_s))},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a terminal's Ctrl-C reaches the benchmark only, which then ends the server
        )
    process = psutil.Process(child.pid)
    below = Descendants(process)
    try:
        _wait_until_ready(child, url, model, log, start_s)
        yield BenchServer(url, process, log)
    finally:
        below.note()
        child.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(STOP_S)
        below.end(threading.Event())
        if child.poll() is None:
            child.kill()
        child.wait()


def _wait_until_ready(child: subprocess.Popen[bytes], url: str, model: str, log: Path, start_s: float) -> None:
    body = {"model": model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 1}
    deadline = time.monotonic() + start_s
    with httpx.Client(timeout=60) as client:  # one for all: making one takes as long as many a prompt
        while True:
            with contextlib.suppress(httpx.HTTPError):
                # Serve's proxy answers 404 before the application is there, and 503 before a replica is.
                if client.post(f"{url}/v1/chat/completions", json=body).status_code == 200:
                    return
            if child.poll() is not None:
                raise ServerError(
                    f"The server ended with code {child.returncode} before it was ready:\n{last_lines(log)}"
                )
            if time.monotonic() > deadline:
                raise ServerError(f"The server was not ready after {start_s:g} s:\n{last_lines(log)}")
            time.sleep(READY_POLL_S)


def chunk_tokens(url: str) -> ChunkTokens | None:
    """What a crosskv server has counted since its start; None where it does not say."""
    try:
        text = httpx.get(f"{url}/metrics", timeout=10).text
        samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    except (httpx.HTTPError, ValueError):
        return None
    by_outcome = {sample.labels.get("outcome"): sample.value for sample in samples if sample.name == CHUNK_TOKENS}
    if not {"asked", "found"} <= by_outcome.keys():
        return None
    return ChunkTokens(by_outcome["asked"], by_outcome["found"])


def last_lines(log: Path) -> str:
    """The end of a log, and where it lies."""
    lines = [line for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    return "\n".join([*lines[-_LAST_LINES:], f"The whole story: {log}"])
