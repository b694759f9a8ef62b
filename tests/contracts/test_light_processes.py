"""What only moves bytes runs without the engine's libraries: they cost a process seconds and hundreds of megabytes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from source_imports import ROOT

from app.launch.ports import free_port

ENGINE = ("torch", "transformers", "vllm")


def run(*command: str) -> str:
    """What a fresh Python prints."""
    paths = os.pathsep.join(map(str, (ROOT, ROOT / "tests" / "deployments")))
    environment = {**os.environ, "PYTHONPATH": paths}
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("module", ["deployments.cpu_tier.actor", "deployments.redis_tier.actor"])
def test_a_tier_starts_without_the_engines_libraries(module: str) -> None:
    assert run("-c", f"import sys, {module}; print(set(sys.modules) & {set(ENGINE)})") == "set()\n"


def test_the_command_line_starts_without_ray_and_the_engines_libraries() -> None:
    modules = "app.cli.__main__, app.cli.doctor.settings_file"
    assert run("-c", f"import sys, {modules}; print(set(sys.modules) & {set(ENGINE) | {'ray'}})") == "set()\n"


def test_the_launcher_checks_settings_without_ray_and_the_engines_libraries() -> None:
    program = f"""
import sys
from pathlib import Path
import app.launch.__main__
from app.launch.plan import Overrides, make_plan
make_plan(Path("{ROOT / "serve_config.yaml"}"), Overrides(port={free_port()}))
print(set(sys.modules) & {set(ENGINE) | {"ray"}})
"""
    assert run("-c", program) == "set()\n"


def test_a_prefetch_worker_starts_and_codes_without_the_engines_libraries() -> None:
    program = Path(__file__).with_name("coding_worker.py")
    loaded = json.loads(run(str(program), *ENGINE))
    assert loaded == {"start": [], "lossless": [], "cachegen": []}
