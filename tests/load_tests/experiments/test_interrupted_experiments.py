"""The study as a process with a real engine, stopped."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from configs.model_folder import PROJECT_ROOT
from load_tests.harness.patience import patience


@pytest.mark.server
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_background_job_is_interrupted_too_and_ends_its_engine(tmp_path: Path, number: int) -> None:
    """A shell starts such a job with SIGINT ignored."""
    words = ["--quick", "--only", "kv_bytes", "--model", "10m", "--state", str(tmp_path), "--docs", str(tmp_path)]
    program = [sys.executable, "-m", "load_tests.experiments", *words]
    command = ["/bin/sh", "-c", 'trap "" INT; exec "$@"', "job", *program]
    job = subprocess.Popen(command, cwd=PROJECT_ROOT, stderr=subprocess.PIPE, text=True, process_group=0)
    try:
        while not (tmp_path / "engine.log").exists():  # it is opened by the engine's process
            assert job.poll() is None
            time.sleep(0.1)
        below = psutil.Process(job.pid).children(recursive=True)
        job.send_signal(number)
        _, said = job.communicate(timeout=patience(120))
    finally:
        job.kill()
    assert job.returncode == 130
    assert "the same command goes on" in said
    assert psutil.wait_procs(below, timeout=patience(30))[1] == []
