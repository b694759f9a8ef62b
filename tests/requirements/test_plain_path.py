"""An environment in a folder whose path has blanks and quotes is entered through a link."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from configs.model_folder import PROJECT_ROOT
from load_tests.harness.patience import patience

sys.path.append(str(PROJECT_ROOT / "requirements"))
from plain_path import link_to

ODD = '-it\'s "My $Projekt" ü & `x; '
"""What a shell, make or a `.pth` file takes for something else; the blank at its end too."""
SEEN = (
    "import json, sys, one_of_the_project\n"
    "print(json.dumps([sys.executable, sys.prefix, sys.argv, sys.flags.optimize]))"
)


@pytest.fixture(scope="module")
def python() -> Iterator[Path]:
    """Of an environment in such a folder, as install.sh leaves it; the packages of this one can be imported, too."""
    project = Path(tempfile.mkdtemp(prefix="crosskv-"), ODD)
    project.mkdir()
    (project / "one_of_the_project.py").touch()
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(project / ".venv")], check=True)
    (site,) = (project / ".venv").glob("lib/*/site-packages")
    shutil.copy(PROJECT_ROOT / "requirements" / "plain_path.py", site / "crosskv_plain_path.py")
    enter = f"import crosskv_plain_path; crosskv_plain_path.enter({str(project)!a})\n"
    (site / "crosskv_plain_path.pth").write_text(enter, encoding="utf-8")
    (site / "packages.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    made = project / ".venv" / "bin" / "python"
    yield made
    link = Path(run(made, "-c", "import sys; print(sys.prefix)").strip())
    if link.is_symlink():
        link.unlink()
    shutil.rmtree(project.parent)


def run(*command: str | Path) -> str:
    ended = subprocess.run(command, cwd="/", capture_output=True, text=True, timeout=patience(120), check=False)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_python_runs_by_a_plain_path_with_the_same_arguments_and_imports_the_project(python: Path) -> None:
    executable, prefix, arguments, optimize = json.loads(run(python, "-O", "-c", SEEN, "one two", "ü"))
    assert shlex.quote(executable) == executable
    assert Path(executable) == Path(prefix, "bin", "python")
    assert Path(prefix).resolve() == python.parents[1].resolve()
    assert (arguments, optimize) == (["-c", "one two", "ü"], 1)


@pytest.mark.server
def test_ray_starts_a_worker_there(python: Path) -> None:
    code = (
        "import ray, tempfile\n"
        "folder = tempfile.mkdtemp(prefix='crosskv-')\n"
        "ray.init(address='local', num_cpus=1, include_dashboard=False, log_to_driver=False, _temp_dir=folder)\n"
        "print(ray.get(ray.remote(lambda: 'a worker answers').remote(), timeout=100))\n"
        "ray.shutdown()\n"
        "import shutil; shutil.rmtree(folder, ignore_errors=True)\n"
    )
    assert "a worker answers" in run(python, "-c", code)


def test_a_link_is_used_again_and_another_users_or_a_wrong_one_never(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment, first, second = (str(tmp_path / name) for name in ("the environment", "first", "second"))
    for folder in (environment, first, second):
        Path(folder).mkdir()
    assert link_to(environment, ("/nonexistent",)) is None
    link = link_to(environment, ("/nonexistent", first, second))
    assert link is not None
    assert (Path(link).parent, Path(link).readlink()) == (Path(first), Path(environment))
    assert link_to(environment, (first, second)) == link
    Path(link).unlink()
    Path(link).symlink_to(second)
    assert link_to(environment, (first,)) is None
    moved = link_to(environment, (first, second))
    assert moved is not None
    assert Path(moved).parent == Path(second)
    owner = Path(moved).lstat().st_uid
    monkeypatch.setattr("os.geteuid", lambda: owner + 1)
    Path(moved).rename(Path(moved).with_name(f"crosskv-env-{owner + 1}-{moved.rpartition('-')[2]}"))
    assert link_to(environment, (second,)) is None
