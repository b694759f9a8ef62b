"""Twenty-five minutes under load: no process of a server grows once its bounded memories are full."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from configs.model_folder import PROJECT_ROOT
from load_tests.harness.patience import patience
from load_tests.harness.server import RunningServer
from load_tests.soak.__main__ import Watched, grows, growth, read, table

pytestmark = pytest.mark.server

WARM_UP_S, SOAK_S, EVERY_S = 900.0, 1500.0, 5.0
"""The manager's log of deltas (262,144 blocks) and its 6,710 ghosts are full after 7,000 requests or 12 minutes."""
USERS = 8
MOST_GCS_BYTES = 60 * 2**20
SETTINGS: dict[str, Any] = {
    # Tiers and memories that are full after the warm-up: what fills them is no growth.
    "kv": {"cpu_tier_bytes": "64MiB", "redis_bytes": "64MiB"},
    "http": {"answer_memory_bytes": "1MiB"},
}


def load(server: RunningServer, folder: Path, duration_s: float) -> subprocess.Popen[bytes]:
    """Conversations of `USERS` users."""
    words = ["--port", str(server.port), "--users", str(USERS), "--think-s", "0.5", "--duration", str(int(duration_s))]
    command = [sys.executable, "-m", "load_tests.locust", *words, "--results", str(folder / "results")]
    return subprocess.Popen(command, cwd=PROJECT_ROOT, stdout=subprocess.DEVNULL)


def watched_for(server: RunningServer, duration_s: float) -> tuple[list[float], dict[int, Watched]]:
    """Readings of every process."""
    times: list[float] = []
    watched: dict[int, Watched] = {}
    began = time.monotonic()
    while (now := time.monotonic() - began) < duration_s:
        read(server.launcher, watched)
        times.append(now)
        time.sleep(EVERY_S)
    return times, watched


@pytest.mark.long(
    "tests/deployments/protocol/test_free_memory.py::test_free_memory_between_blocks_in_use_is_given_back"
)
@pytest.mark.long("tests/app/launch/test_ray_environment.py")
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("private_server", [SETTINGS], indirect=True)
def test_no_process_grows_under_load(private_server: RunningServer, tmp_path: Path) -> None:
    locust = load(private_server, tmp_path, WARM_UP_S + SOAK_S)
    try:
        time.sleep(WARM_UP_S)
        times, watched = watched_for(private_server, SOAK_S)
        assert locust.wait(patience(300)) == 0, "some requests failed"
    finally:
        locust.kill()
    found = growth(times, watched)
    print(table(found))
    assert [one.kind for one, line in found if grows(line)] == [], table(found)
    children = private_server.launcher.children(recursive=True)
    (gcs,) = [process for process in children if any("gcs_server" in word for word in process.cmdline()[:1])]
    assert watched[gcs.pid].uss_bytes[-1] <= MOST_GCS_BYTES
