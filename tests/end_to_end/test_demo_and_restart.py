"""`make demo` on a server as `make serve` starts it, the full restart in its middle included."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from configs.model_folder import PROJECT_ROOT
from load_tests.harness.running_server import RunningServer

pytestmark = [pytest.mark.server, pytest.mark.timeout(400)]


@pytest.mark.parametrize("private_server", [{}], indirect=True)
def test_the_demo_passes_and_finds_its_kv_in_redis_after_a_full_restart(private_server: RunningServer) -> None:
    command = [sys.executable, "-m", "app.demo", "--port", str(private_server.port), "--json", "-"]
    done = subprocess.run(command, cwd=PROJECT_ROOT, capture_output=True, text=True, timeout=380)

    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert all(row["passed"] for row in rows), "no scene was left out"
    restarted = [row for row in rows if "restart" in row["scene"]]
    assert restarted
    assert all(row["tokens"]["redis"] > 256 for row in restarted)
