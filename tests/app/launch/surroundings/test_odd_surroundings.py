"""The launcher around a stub application, where everything is odd at once."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from app.launch.ports import free_port
from tests.app.launch.launched import Launched
from tests.app.launch.stub_config import write_config

pytestmark = [pytest.mark.server, pytest.mark.timeout(600)]

FEW_FILES = 'ulimit -Sn 1024; ulimit -Hn 1024; exec "$@"'
ODD = {
    "PYTHONOPTIMIZE": "2",
    "PYTHONWARNINGS": "error::DeprecationWarning",
    "PYTHONUTF8": "0",
    "PYTHONCOERCECLOCALE": "0",
    "LC_ALL": "C",
}


def test_it_starts_and_ends_with_few_files_a_long_tmpdir_ascii_and_switches_of_python(
    tmp_path: Path, model_folder: Path
) -> None:
    long = tmp_path / ("a" * 60) / ("b" * 60)
    long.mkdir(parents=True)
    odd = [f"{name}={value}" for name, value in (ODD | {"TMPDIR": str(long)}).items()]
    config = write_config(tmp_path, model_folder, port=free_port())
    with config.open("a", encoding="utf-8") as file:
        file.write("# ünïcode 🙂\n")
    command = ["env", *odd, "sh", "-c", FEW_FILES, "sh", sys.executable, "-m", "app.launch", str(config)]
    server = Launched(command, tmp_path / "output")
    try:
        server.wait_until("Ctrl-C stops it")
        assert server.is_healthy()
        said = server.text()
        server.process.send_signal(signal.SIGTERM)
        server.assert_ends()
    finally:
        server.end()
    assert "Traceback" not in said
    assert "too long a path for a socket" in said
    assert "PYTHONOPTIMIZE" in said
    assert "may open 1024 files" in said
