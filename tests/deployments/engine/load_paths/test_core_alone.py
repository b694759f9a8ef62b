"""The core is complete without its extensions: a copy of the project that lacks them serves, and exactly."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from configs.settings import PROJECT_ROOT
from deployments.engine.load_paths.parts import PATHS
from load_tests.harness.patience import patience

PROGRAM = Path(__file__).with_name("core_alone.py")
PACKAGES = ("configs", "deployments", "kernels", "kvmanager", "load_tests/harness")
FILES = ("load_tests/__init__.py", "pyproject.toml", "serve_config.yaml")
PATIENCE_S = 120.0


def copy_without_extensions(folder: Path) -> None:
    for package in PACKAGES:
        shutil.copytree(PROJECT_ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(PROJECT_ROOT / name, folder / name)
    for module in PATHS.values():
        # A folder of its own, or one module: what lies directly below the room of load paths.
        path = folder.joinpath(*module.split(".")[:4])
        shutil.rmtree(path) if path.is_dir() else path.with_suffix(".py").unlink()


def test_a_copy_without_extensions_loads_and_answers_exactly(demo_model: Path, tmp_path: Path) -> None:
    copy_without_extensions(tmp_path)
    shutil.copy(PROGRAM, tmp_path)

    done = subprocess.run(
        [sys.executable, PROGRAM.name, str(demo_model)],  # its own folder is the first that Python looks into
        cwd=tmp_path,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=patience(PATIENCE_S),
    )

    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.splitlines()[-1] == "exact, with base parts whole"
