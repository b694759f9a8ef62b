"""Ray comes up however late its agents are; one that does not is started once more, and nothing of the first stays."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from configs.model_folder import PROJECT_ROOT
from load_tests.harness.patience import patience

FAILING = """
import json, subprocess, sys
from pathlib import Path
import psutil, ray
from app.launch.ray_start import start_ray

folder, fails, tries = Path(sys.argv[1]), int(sys.argv[2]), []

def init(**options):
    tries.append({"options": options, "daemons": len(psutil.Process().children()), "files": folder.exists()})
    folder.mkdir()
    subprocess.Popen(["sleep", "600"])
    if len(tries) <= fails:
        raise Exception("some of the raylet failed to startup")

ray.init = init
try:
    start_ray({"_temp_dir": str(folder), "num_cpus": 3})
finally:
    for child in psutil.Process().children():
        child.kill()
    print(json.dumps(tries))
"""
HANGING = """
import psutil, ray
from ray._private import services
from app.launch.descendants import become_subreaper
from app.launch.ray_start import end_all, start_ray
from app.launch.surroundings.folder import private_folder

become_subreaper()
found = services.get_node

def hanging(*asked):
    services.get_node = found
    for process in psutil.Process().children(recursive=True):
        if process.name() == "raylet":
            process.suspend()
    raise Exception("The current node timed out during startup.")

services.get_node, folder = hanging, private_folder()
start_ray({"address": "local", "include_dashboard": False, "_temp_dir": str(folder), "num_cpus": 1})
print(ray.get(ray.remote(lambda: "well").remote()))
end_all(folder)
print(len(psutil.Process().children()))
"""
LATE = """
import os, ray, sys
from pathlib import Path
from app.launch.descendants import become_subreaper
from app.launch.ray_start import end_all, start_ray
from app.launch.surroundings.folder import private_folder

become_subreaper()
folder = private_folder()
start_ray({"address": "local", "include_dashboard": False, "_temp_dir": str(folder), "num_cpus": 1})
print(ray.get(ray.remote(lambda: "well").remote()))
Path(sys.argv[1]).touch()
print(ray.get(ray.remote(lambda: os.environ["SAID"]).options(runtime_env={"env_vars": {"SAID": "set up"}}).remote()))
end_all(folder)
"""
HELD = """
import sys, time
from pathlib import Path
if any(word.endswith(("dashboard/agent.py", "agent/main.py")) for word in sys.orig_argv):
    while not Path({ready!r}).exists():
        time.sleep(0.1)
"""


def run(program: str, *arguments: object, path: Path = PROJECT_ROOT) -> subprocess.CompletedProcess[str]:
    """Run a program in a fresh Python, which looks for modules in `path` before it looks anywhere else."""
    command, environment = [sys.executable, "-c", program, *map(str, arguments)], os.environ | {"PYTHONPATH": str(path)}
    return subprocess.run(
        command, cwd=PROJECT_ROOT, env=environment, capture_output=True, text=True, timeout=patience(120), check=False
    )


@pytest.mark.parametrize("fails", [0, 1, 2])
def test_it_is_started_twice_at_most_and_the_second_time_with_nothing_of_the_first(tmp_path: Path, fails: int) -> None:
    done = run(FAILING, tmp_path / "ray", fails)
    assert done.returncode == (fails == 2), done.stderr
    said, tries = done.stdout.splitlines()[:-1], json.loads(done.stdout.splitlines()[-1])
    first: dict[str, Any] = {
        "options": {"_temp_dir": str(tmp_path / "ray"), "num_cpus": 3},
        "daemons": 0,
        "files": False,
    }
    assert tries == [first] * min(fails + 1, 2)
    word = "Ray has not come up, and is started once more. It said: some of the raylet failed to startup"
    assert said == [word] * (fails > 0)
    assert ("some of the raylet failed to startup" in done.stderr) is (fails == 2)


@pytest.mark.server
def test_one_whose_agents_do_not_start_for_long_runs_what_needs_none_of_them(tmp_path: Path) -> None:
    """Left to itself a raylet gives each 15 s, and ends."""
    ready = tmp_path / "ready"
    (tmp_path / "sitecustomize.py").write_text(HELD.format(ready=str(ready)), encoding="utf-8")
    done = run(LATE, ready, path=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["well", "set up"]


@pytest.mark.server
@pytest.mark.long(
    "tests/app/launch/test_ray_start.py::test_it_is_started_twice_at_most_and_the_second_time_with_nothing_of_the_first"
)
def test_a_real_one_whose_raylet_hangs_makes_room_for_another() -> None:
    done = run(HANGING)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-2:] == ["well", "0"]
