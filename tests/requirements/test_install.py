"""What `install.sh` says and takes before it installs anything."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sysconfig
from pathlib import Path

import pytest

from configs.model_folder import PROJECT_ROOT
from load_tests.harness.patience import patience
from load_tests.peers.serve_llm import EXTRA_PACKAGES, missing_packages

PRETENDED = """#!/bin/sh
case "$*" in
*version_info*) echo {version} ;;
*ensurepip*) exit {without_ensurepip} ;;
*venv*) exit 1 ;;
esac
"""
"""A Python of a version, in which nothing can be installed."""


def install(project: Path, **variables: str) -> str:
    """Run it in a copy, to its end, which is a failure; what it says."""
    project.mkdir(parents=True, exist_ok=True)
    shutil.copytree(PROJECT_ROOT / "requirements", project / "requirements", dirs_exist_ok=True)
    chosen = ("PYTHON", "TORCH")  # as `make test PYTHON=…` hands on
    own = {name: value for name, value in os.environ.items() if name not in chosen}
    environment = {**own, "ACCELERATOR": "cpu", **variables}
    ended = subprocess.run(
        ["requirements/install.sh", "server"],
        cwd=project,
        env=environment,
        capture_output=True,
        text=True,
        timeout=patience(120),
        check=False,
    )
    assert ended.returncode == 1, ended.stdout
    return ended.stdout + ended.stderr


def pretend(folder: Path, name: str, version: str, without_ensurepip: int = 0) -> None:
    program = folder / name
    program.write_text(PRETENDED.format(version=version, without_ensurepip=without_ensurepip), encoding="utf-8")
    program.chmod(0o755)


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    """A folder in front of the PATH; a disk that is full is none of these tests' business."""
    folder = tmp_path / "programs"
    folder.mkdir()
    for name in ("python3.14", "python3.13", "python3.12", "python3.11", "python3", "python"):
        pretend(folder, name, "3.10")
    (folder / "df").write_text("#!/bin/sh\necho Filesystem\necho / 0 0 99999999 0 /\n", encoding="utf-8")
    (folder / "df").chmod(0o755)
    return folder


def path_with(programs: Path) -> str:
    return f"{programs}:{os.environ['PATH']}"


def test_without_a_python_that_fits_the_sentence_names_how_to_get_one(tmp_path: Path, programs: Path) -> None:
    said = install(tmp_path / "project", PATH=path_with(programs))
    assert "no Python from 3.11 to 3.14 was found" in said
    assert "uv python install" in said
    said = install(tmp_path / "project", PYTHON=str(tmp_path / "not here"))
    assert f"(looked for: {tmp_path}/not here)" in said


@pytest.mark.parametrize(
    ("versions", "taken"),
    [
        (["3.11"], "3.11"),
        (["3.11", "3.13", "3.12"], "3.13"),
        (["3.11", "3.14"], "3.14"),
    ],
)
def test_the_newest_python_that_the_lock_files_are_for_is_tried_first(
    tmp_path: Path, programs: Path, versions: list[str], taken: str
) -> None:
    for version in versions:
        pretend(programs, f"python{version}", version)
    pretend(programs, "python3", "3.15")
    said = install(tmp_path / "project", PATH=path_with(programs))
    assert f"{programs}/python{taken} could not create" in said


def test_a_python_without_ensurepip_is_passed_over(tmp_path: Path, programs: Path) -> None:
    pretend(programs, "python3.13", "3.13", without_ensurepip=1)
    said = install(tmp_path / "one", PATH=path_with(programs))
    assert "python3.13 cannot make virtual environments" in said
    pretend(programs, "python3.12", "3.12")
    said = install(tmp_path / "two", PATH=path_with(programs))
    assert "python3.12 could not create" in said


def test_a_path_that_no_environment_can_have_is_refused(tmp_path: Path, programs: Path) -> None:
    said = install(tmp_path / "a:colon", PATH=path_with(programs))
    assert "has a colon or a line's end in its path" in said


def test_a_named_python_may_lie_below_a_blank(tmp_path: Path, programs: Path) -> None:
    (tmp_path / "a blank").mkdir()
    pretend(tmp_path / "a blank", "python", "3.12")
    said = install(tmp_path / "project", PATH=path_with(programs), PYTHON=str(tmp_path / "a blank" / "python"))
    assert "a blank/python could not create" in said


def test_what_is_imported_ahead_is_there() -> None:
    """What is not would be compiled by each of a server's processes for itself, in silence."""
    script = (PROJECT_ROOT / "requirements" / "install.sh").read_text(encoding="utf-8")
    lists = re.findall(r"^with(?:out)?_vllm=\((.*?)\)", script, re.MULTILINE | re.DOTALL)
    names = [name for each in lists for name in each.split()]
    assert len(lists) == 2
    assert len(names) > 10
    places = [PROJECT_ROOT, Path(sysconfig.get_path("purelib"))]
    assert [
        name for name in names if not any((place / f"{name.replace('.', '/')}.py").exists() for place in places)
    ] == []


def test_no_process_of_a_server_finds_what_one_peer_of_the_benchmarks_imports() -> None:
    """Ray's processes import pandas where they find it: 67 MB of each, and half as long again until it has started."""
    script = (PROJECT_ROOT / "requirements" / "install.sh").read_text(encoding="utf-8")
    found = re.search(r"^of_a_peer=\((.*?)\)", script, re.MULTILINE)
    assert found is not None
    assert tuple(found[1].split()) == EXTRA_PACKAGES
    assert missing_packages() == []
    assert [name for name in EXTRA_PACKAGES if importlib.util.find_spec(name) is not None] == []
