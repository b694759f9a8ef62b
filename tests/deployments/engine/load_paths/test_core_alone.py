"""The core is complete without its extensions: a copy of the project that lacks them serves, and exactly."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from app.extensions import INGRESS_EXTENSIONS
from configs.settings import PROJECT_ROOT
from deployments.engine.load_paths.parts import PATHS
from deployments.replica.extensions import REPLICA_EXTENSIONS
from deployments.segment_store.stored_form import FORMS
from kvmanager.extensions import PLAN_EXTENSIONS
from load_tests.harness.patience import patience

PROGRAM = Path(__file__).with_name("core_alone.py")
FAKES = PROJECT_ROOT / "tests" / "app" / "fake_backend.py"
"""Replicas without an engine, over which the ingress answers."""
PACKAGES = ("app", "configs", "deployments", "kernels", "kvmanager", "load_tests/harness")
FILES = ("load_tests/__init__.py", "pyproject.toml", "serve_config.yaml")
PATIENCE_S = 120.0
TABLES = {
    "deployments.engine.load_paths": PATHS.values(),
    "deployments.replica.extensions": REPLICA_EXTENSIONS.values(),
    "deployments.segment_store": FORMS.values(),
    "kvmanager.extensions": PLAN_EXTENSIONS.values(),
    "app.extensions": INGRESS_EXTENSIONS.values(),
}
"""By room, the modules that its table of extensions names."""
ROOMS = (*TABLES, "deployments.protocol.extensions", "kernels.blend", "kernels.sparse")
"""Those, and rooms that only extensions use: they go whole."""


def copy_without_extensions(folder: Path) -> None:
    for package in PACKAGES:
        # With what is compiled, but not with files that another test's process is about to rename.
        shutil.copytree(PROJECT_ROOT / package, folder / package, ignore=shutil.ignore_patterns("*.pyc.*", "*.tmp*"))
    for name in FILES:
        shutil.copy(PROJECT_ROOT / name, folder / name)
    for room in ROOMS:
        for module in TABLES.get(room, ("",)):
            # A folder of its own, or one module: what lies directly below the room that has its table.
            name = module.removeprefix(f"{room}.").split(".")[0]
            path = folder.joinpath(*room.split("."), name)
            shutil.rmtree(path) if path.is_dir() else path.with_suffix(".py").unlink()


def test_a_copy_without_extensions_loads_and_answers_exactly(demo_model: Path, tmp_path: Path) -> None:
    copy_without_extensions(tmp_path)
    shutil.copy(PROGRAM, tmp_path)
    shutil.copy(FAKES, tmp_path)

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
