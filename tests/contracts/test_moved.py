"""Another version of a library is compared by its files; the installed ones are read as their imports find them."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import ray_symbols
import vllm_symbols
from library_source import LibrarySource, UnreadableSourceError
from moved import compare
from source_imports import ROOT, Import

OLD = {
    "engine/__init__.py": "from lib.engine.core import Core\n",
    "engine/core.py": (
        "from ..base import Base as Common\n"
        "class Core(Common):\n"
        "    size: int\n"
        "    def __init__(self, size): self.size, self.queue = size, []\n"
        "    def step(self, tokens): return tokens\n"
        "    def stop(self): pass\n"
    ),
    "base.py": "class Base:\n    def shared(self): self.found = 1\n",
    "text.py": "try:\n    import fast\nexcept ImportError:\n    def render(text, *, style=None): return text\n",
    "star.py": "from .text import *\n",
}


def library(folder: Path, files: dict[str, str]) -> Path:
    """A wheel with these files."""
    wheel = folder / "lib.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("lib/__init__.py", "")
        archive.writestr("lib-1.5.dist-info/METADATA", "Name: lib\nVersion: 1.5\n")
        for name, text in files.items():
            archive.writestr(f"lib/{name}", text)
    return wheel


def source(folder: Path, files: dict[str, str]) -> LibrarySource:
    folder.mkdir()
    return LibrarySource(library(folder, files), "lib")


def said(tmp_path: Path, changes: dict[str, str]) -> list[str]:
    """What is printed of a version with other files."""
    old, new = source(tmp_path / "old", OLD), source(tmp_path / "new", OLD | changes)
    imported = [
        Import("app.one", "lib.engine", "Core", "top"),
        Import("app.two", "lib.text", "render", "top"),
        Import("app.two", "lib.star", "", "function"),
    ]
    used = {"lib.engine:Core": {"size", "queue", "step", "stop", "shared", "found"}}
    return list(compare(old, new, imported, used).lines())


def test_of_the_same_version_nothing_is_said(tmp_path: Path) -> None:
    assert said(tmp_path, {}) == []


def test_a_name_that_lies_elsewhere_is_said_to_its_importer_with_its_new_place(tmp_path: Path) -> None:
    found = said(tmp_path, {"text.py": "", "texts.py": "def render(text, *, style=None): return text\n"})
    assert found == ["app.two", "  lib.text.render is gone; there is one in lib.texts"]


def test_a_module_that_is_gone_is_said(tmp_path: Path) -> None:
    old = source(tmp_path / "old", OLD)
    new = source(tmp_path / "new", {name: text for name, text in OLD.items() if name != "star.py"})
    assert list(compare(old, new, [Import("app.two", "lib.star", "", "top")], {}).lines()) == [
        "app.two",
        "  lib.star is gone",
    ]


@pytest.mark.parametrize(
    ("before", "after", "gone"),
    [
        ("def stop(self): pass", "", "Core.stop is gone"),
        ("(Common)", "", "Core.shared is gone"),
        (", self.queue = size, []", " = size", "Core.queue is gone"),
        ("class Core", "class Heart", "lib.engine.Core is gone"),
    ],
)
def test_an_attribute_is_missed_wherever_it_came_from(tmp_path: Path, before: str, after: str, gone: str) -> None:
    text = OLD["engine/core.py"].replace(before, after)
    assert f"  {gone}" in said(tmp_path, {"engine/core.py": text})


def test_other_arguments_are_named(tmp_path: Path) -> None:
    text = OLD["engine/core.py"].replace("step(self, tokens)", "step(self, batch, *, eager)")
    found = said(tmp_path, {"engine/core.py": text})
    assert "  Core.step no longer has (tokens), and has (batch, eager=)" in found


def test_another_default_is_named(tmp_path: Path) -> None:
    found = said(tmp_path, {"text.py": OLD["text.py"].replace("style=None", "style='plain'")})
    assert found == ["app.two", "  lib.text.render no longer has (style=None), and has (style='plain')"]


def test_a_function_with_other_code_is_to_be_read_and_one_with_another_docstring_is_not(tmp_path: Path) -> None:
    text = OLD["engine/core.py"].replace("return tokens", "return sorted(tokens)")
    text = text.replace("def stop(self): pass", 'def stop(self):\n        """End."""\n        pass')
    (first, names) = said(tmp_path, {"engine/core.py": text})
    assert first.startswith("Where it was")
    assert names.endswith(": Core.step")


def test_a_star_hands_names_on(tmp_path: Path) -> None:
    whole = source(tmp_path / "old", OLD)
    assert whole.has("lib.star", "render")
    assert not whole.has("lib.star", "other")
    assert whole.version == "1.5"


@pytest.mark.parametrize("name", ["vllm", "ray"])
def test_the_installed_version_has_for_the_reader_what_it_has_for_an_import(name: str) -> None:
    found = importlib.util.find_spec(name)
    assert found
    assert found.origin
    installed = LibrarySource(Path(found.origin).parents[1], name)
    listed = vllm_symbols if name == "vllm" else ray_symbols
    private = {module: each for module, (each, _) in ray_symbols.PRIVATE.items()}
    imported = vllm_symbols.IMPORTED if name == "vllm" else private
    unseen = [
        f"{module}.{each}"
        for module, names in imported.items()
        for each in names or {""}
        if not installed.has(module, each)
    ]
    for path, attributes in listed.USED.items():
        module, _, class_name = path.partition(":")
        unseen += [f"{path}.{each}" for each in attributes - installed.attributes(module, class_name).keys()]
    assert unseen == []
    assert installed.version.split("+")[0] == listed.VERSION


def test_a_file_that_is_no_wheel_is_refused(tmp_path: Path) -> None:
    wrong = tmp_path / "notes.txt"
    wrong.write_text("no wheel")
    with pytest.raises(UnreadableSourceError, match=r"notes\.txt is no wheel"):
        LibrarySource(wrong, "vllm")


@pytest.mark.parametrize("wheel", ["missing.whl", "lib.whl"])
def test_the_command_ends_with_a_sentence_where_there_is_nothing_to_compare(tmp_path: Path, wheel: str) -> None:
    library(tmp_path, {})
    program = [sys.executable, str(ROOT / "tests/contracts/moved.py"), str(tmp_path / wheel)]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert wheel in done.stderr
    assert "Traceback" not in done.stderr
