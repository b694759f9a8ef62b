"""What the documentation names is there: pages, anchors, files, settings, metrics, commands."""

from __future__ import annotations

import fnmatch
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # pytest's importlib mode leaves the modules beside tests unimportable

import pages

from configs.errors import field_names
from configs.model_folder import PROJECT_ROOT
from configs.settings import Settings

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_PAGE = re.compile(r"(?<![\w/.])docs/[\w/.-]+?\.md(?:#[\w-]+)?")
_SETTING = re.compile(r"(?:kv|blending|http|engine|roles|routing|scaling|faults)(?:\.[a-z][a-z_]*)+")
_METRIC = re.compile(r"crosskv_[a-z0-9_]+(?!\.)\b")
_MODULE = re.compile(r"python -m ([a-z_]+(?:\.[a-z_]+)*)")
_TARGET = re.compile(r"(?:^|`)make ([a-z-]+)", re.MULTILINE)
_BRACES = re.compile(r"(.*)\{([^{}]*)\}(.*)")
_NAMED_FILES = (".py", ".md", ".yaml")
_OURS = ("app", "configs", "deployments", "kernels", "kvmanager", "load_tests", "models", "tests", "requirements")

ALL = pytest.mark.parametrize("page", pages.markdown())
PRESENT = pytest.mark.parametrize("page", [page for page in pages.markdown() if page not in pages.HISTORY])


@ALL
def test_no_link_is_dead(page: str) -> None:
    assert not [
        link for link in _LINK.findall(pages.without_code(pages.read(page))) if not _leads_somewhere(page, link)
    ]


def _leads_somewhere(page: str, link: str) -> bool:
    if re.match(r"[a-z]+:", link):
        return True
    target, _, anchor = link.partition("#")
    path = pages.resolved(page, target) if target else PROJECT_ROOT / page
    if not path.exists():
        return False
    return not anchor or path.suffix != ".md" or anchor in pages.anchors(path.read_text())


@PRESENT
def test_no_file_is_named_that_does_not_exist(page: str) -> None:
    assert not [name for name in pages.in_backticks(pages.read(page)) if not _exists(page, name)]


def _exists(page: str, name: str) -> bool:
    """Whether a name in backticks is no file's, or is that of one, from the root or from or below the page's folder."""
    name = name.partition("::")[0].removesuffix("/")
    top = name.partition("/")[0]
    if not re.fullmatch(r"[\w./*{},-]+", name) or not (name.endswith(_NAMED_FILES) or (top in _OURS and "/" in name)):
        return True
    folder = str(Path(page).parent)
    return (
        name == "__init__.py"
        or _is_ignored(name)
        or all(
            any(
                fnmatch.fnmatchcase(file, pattern)
                for wanted in (one, f"{folder}/{one}", f"{folder}/**/{one}")
                for pattern in (wanted.replace("**/", "*"), f"{wanted.replace('**/', '*')}/*")
                for file in pages.tracked()
            )
            for one in _spelled_out(name)
        )
    )


@cache
def _is_ignored(name: str) -> bool:
    """Whether git ignores it: what a program writes."""
    command = ["git", "check-ignore", name, f"{name}/"]
    return bool(subprocess.run(command, cwd=PROJECT_ROOT, check=False, capture_output=True).stdout)


def _spelled_out(name: str) -> list[str]:
    match = _BRACES.fullmatch(name)
    if not match:
        return [name]
    before, parts, after = match.groups()
    return [each for part in parts.split(",") for each in _spelled_out(f"{before}{part}{after}")]


def test_no_page_is_named_that_does_not_exist() -> None:
    """In code, comments and settings, too."""
    named = {
        (path, page)
        for path in pages.tracked()
        if path not in pages.HISTORY and path.endswith((".py", ".md", ".yaml", ".toml", ".sh", "Makefile"))
        for page in _PAGE.findall(pages.read(path))
    }
    dead = sorted((path, page) for path, page in named if not _leads_somewhere("README.md", page))
    assert not dead


@PRESENT
def test_no_setting_is_named_that_does_not_exist(page: str) -> None:
    known = set(field_names(Settings))
    known |= {name.rpartition(".")[0] for name in known}
    named = {found.group() for name in pages.in_backticks(pages.read(page)) if (found := _SETTING.match(name))}
    unknown = sorted(name for name in named if name not in known and not name.endswith((".py", ".md", "_")))
    assert not unknown


@PRESENT
def test_no_metric_is_named_that_does_not_exist(page: str) -> None:
    named = {name for text in pages.in_backticks(pages.read(page)) for name in _METRIC.findall(text)}
    assert not sorted(name for name in named if not name.endswith("_") and not _is_exported(name))


@cache
def _is_exported(name: str) -> bool:
    """Whether the page that is generated from the code has it (`app.metrics.document`)."""
    listed = re.findall(r"^\| `(\w+)", pages.read("docs/guide/metrics.md"), re.MULTILINE)
    return name in listed or re.sub("_(bucket|sum|count)$", "", name) in listed


@PRESENT
def test_no_command_is_named_that_does_not_exist(page: str) -> None:
    text = pages.read(page)
    targets = set(re.findall(r"^([a-z-]+):", pages.read("Makefile"), re.MULTILINE))
    missing = [f"make {name}" for name in _TARGET.findall(text) if name not in targets]
    missing += [f"python -m {name}" for name in _MODULE.findall(text) if not _is_module(name)]
    assert not missing


def _is_module(name: str) -> bool:
    path = name.replace(".", "/")
    return path.partition("/")[0] not in _OURS or not {f"{path}.py", f"{path}/__main__.py"}.isdisjoint(pages.tracked())


def test_the_checks_see_what_they_are_for() -> None:
    assert not _leads_somewhere("README.md", "docs/" + "nowhere.md")
    assert not _leads_somewhere("README.md", "README.md#no-such-heading")
    assert _leads_somewhere("README.md", "SECURITY.md#reporting")
    assert not _exists("README.md", "app/nowhere.py")
    assert not _exists("docs/README.md", "app/{builder,nowhere}.py")
    assert _exists("configs/README.md", "settings.py")
    assert _exists("README.md", "app/ingress.py")
    assert not _is_exported("crosskv_no_such_metric_total")
    assert _is_exported("crosskv_stage_seconds_bucket")
    assert not _is_module("load_tests.nowhere")
