"""What runs beside `make` runs the same: hooks before a commit, the workflow, the container."""

from __future__ import annotations

import os
import re
import subprocess
from collections import Counter
from typing import Any

import yaml

from configs.model_folder import PROJECT_ROOT


def read(name: str) -> str:
    return (PROJECT_ROOT / name).read_text()


def loaded(name: str) -> Any:
    return yaml.safe_load(read(name))


def recipe(target: str) -> list[str]:
    """The commands of a target of the Makefile."""
    found = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", read("Makefile"), re.MULTILINE)
    assert found
    commands = [line.strip().lstrip("@") for line in found[1].splitlines()]
    return [command.replace("$(RUN)", ".venv/bin/python").replace("$(VENV)", ".venv") for command in commands]


def test_the_hooks_before_a_commit_are_the_linters() -> None:
    (local,) = loaded(".pre-commit-config.yaml")["repos"]
    assert local["repo"] == "local"
    assert [hook["entry"] for hook in local["hooks"]] == recipe("lint")
    assert not any(hook["pass_filenames"] for hook in local["hooks"]), "the linters know what they look at"


def test_make_hands_on_no_switch_of_python_that_ray_does_not_start_with() -> None:
    switches = dict.fromkeys(("PYTHONHOME", "PYTHONINSPECT", "PYTHONOPTIMIZE", "PYTHONWARNINGS"), "set")
    shown = subprocess.run(
        ["make", "--eval", "shown: ; @env", "shown"],
        cwd=PROJECT_ROOT,
        env={**os.environ, **switches},
        capture_output=True,
        text=True,
        check=True,
    )
    assert "PATH=" in shown.stdout
    assert not any(f"{name}=" in shown.stdout for name in switches)


def test_the_workflow_runs_what_every_machine_runs() -> None:
    (job,) = loaded(".github/workflows/ci.yml")["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert [line for line in read(".ci/run").splitlines() if line.startswith("make ")] == [
        "make lint </dev/null || status=1",
        "make test </dev/null || status=1",
    ]


def test_no_two_files_of_tests_have_one_name() -> None:
    """The folders of tests are no packages: pytest refuses the second file of a name, in a whole run only."""
    names = Counter(path.name for path in (PROJECT_ROOT / "tests").rglob("test_*.py"))
    assert [name for name, number in names.items() if number > 1] == []


def instructions() -> list[tuple[str, str]]:
    """The Dockerfile's, without comments, continued lines joined."""
    lines = "\n".join(line for line in read("Dockerfile").splitlines() if line and not line.startswith("#"))
    pairs = [line.partition(" ") for line in lines.replace("\\\n", " ").splitlines()]
    return [(name, argument.strip()) for name, _, argument in pairs]


def test_the_container_has_what_the_server_is_installed_and_started_with() -> None:
    found = instructions()
    copied = [
        source
        for name, argument in found
        if name == "COPY"
        for source in argument.split()[:-1]
        if not source.startswith("--")
    ]
    assert [source for source in copied if not (PROJECT_ROOT / source).exists()] == []
    assert ("ARG", "ACCELERATOR=cpu") in found
    assert any(
        name == "RUN" and "ACCELERATOR=${ACCELERATOR} requirements/install.sh server" in run for name, run in found
    )
    assert found[-1] == ("CMD", '[".venv/bin/python", "-m", "app.launch", "serve_config.yaml"]')
    assert [argument for name, argument in found if name == "USER"] == ["1000"], "not root"


def test_the_container_leaves_nothing_out_that_the_server_imports() -> None:
    left_out = {line.strip("/") for line in read(".dockerignore").splitlines() if line and not line.startswith("#")}
    packages = {path.parent.name for path in PROJECT_ROOT.glob("*/__init__.py")}
    assert {"app", "configs", "deployments", "kernels", "kvmanager"} <= packages
    assert not left_out & (packages | {"serve_config.yaml", "requirements", "pyproject.toml", "LICENSE"})
    assert {".git", ".venv", ".crosskv"} <= left_out


def test_what_a_contributor_is_told_to_use_exists() -> None:
    page = read("CONTRIBUTING.md")
    named = set(
        re.findall(r"(?:tests|load_tests|requirements|docs|app|deployments|kvmanager|kernels|configs)/[\w/.]*", page)
    )
    missing = [name for name in named if not (PROJECT_ROOT / name).exists()]
    assert named
    assert missing == []
    targets = set(re.findall(r"make ([a-z-]+)", page))
    assert [target for target in targets if not re.search(rf"^{target}:", read("Makefile"), re.MULTILINE)] == []


def test_the_changelog_has_a_place_for_what_comes() -> None:
    headings = re.findall(r"^## (.*)", read("CHANGELOG.md"), re.MULTILINE)
    assert headings[0] == "[Unreleased]"
    assert headings[1:] == sorted(headings[1:], reverse=True)


def test_no_test_imports_another_one() -> None:
    """It could only while that one's folder happens to be collected too."""
    importing = [
        str(path.relative_to(PROJECT_ROOT))
        for path in (PROJECT_ROOT / "tests").rglob("*.py")
        if re.search(r"^\s*(from|import) test_", path.read_text(), re.MULTILINE)
    ]
    assert importing == []
