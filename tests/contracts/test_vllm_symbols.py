"""Every vLLM name that the product leans on is listed in `vllm_symbols.py`, and is there in the installed vLLM."""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections import defaultdict

import pytest
import vllm
from source_imports import ROOT, imports, source_files
from vllm_symbols import IMPORTED, USED, VERSION


def test_the_installed_vllm_is_the_one_that_the_product_was_tested_with() -> None:
    assert vllm.__version__.split("+")[0] == VERSION, "run this folder and the contract tests, then change VERSION"


@pytest.mark.parametrize("lock", ["cpu", "cuda"])
def test_the_lock_files_pin_that_version(lock: str) -> None:
    pins = re.findall(r"^vllm(?:-cpu)?==([^\s;\\]+)", (ROOT / f"requirements/{lock}.txt").read_text(), re.M)
    assert pins == [VERSION]


def test_no_other_file_of_the_product_states_a_version_of_vllm() -> None:
    stated = [
        str(path.relative_to(ROOT))
        for path in source_files("app", "configs", "deployments", "kernels", "kvmanager")
        if re.search(r"(?i)vllm('s)? \d+\.\d+", path.read_text())
    ]
    assert stated == []


def test_what_is_imported_is_listed_and_nothing_else() -> None:
    found: dict[str, set[str]] = defaultdict(set)
    for package in ("app", "deployments"):
        for each in imports(package):
            if each.module.split(".")[0] == "vllm":
                found[each.module] |= {each.name} - {""}
    assert {module: sorted(names) for module, names in found.items()} == {
        module: sorted(names) for module, names in IMPORTED.items()
    }


@pytest.mark.parametrize("module", IMPORTED)
def test_what_is_imported_is_there(module: str) -> None:
    found = importlib.import_module(module)
    gone = [name for name in sorted(IMPORTED[module]) if not _has(found, name)]
    assert not gone, f"{module} of vllm {vllm.__version__} has no {', '.join(gone)}"


@pytest.mark.parametrize("name", USED)
def test_what_is_asked_of_an_object_is_there(name: str) -> None:
    module, _, class_name = name.partition(":")
    found = getattr(importlib.import_module(module), class_name)
    gone = [each for each in sorted(USED[name]) if not (hasattr(found, each) or _is_set_by(found, each))]
    assert not gone, f"{class_name} of vllm {vllm.__version__} has no {', '.join(gone)}"


def _has(module: object, name: str) -> bool:
    if hasattr(module, name):
        return True
    try:
        importlib.import_module(f"{module.__name__}.{name}")  # type: ignore[attr-defined]
    except ModuleNotFoundError:
        return False
    return True


def _is_set_by(found: type, name: str) -> bool:
    """Whether an instance has it: a field of a dataclass, or set in a method."""
    classes = [each for each in inspect.getmro(found) if each.__module__.startswith("vllm.")]
    return any(
        name in inspect.get_annotations(each) or re.search(rf"self\.{name}\b *[:=]", _source(each)) for each in classes
    )


@functools.cache
def _source(found: type) -> str:
    return inspect.getsource(found)
