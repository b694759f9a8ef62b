"""Every private Ray name that the product leans on is listed in `ray_symbols.py`, and is there in the installed Ray."""

from __future__ import annotations

import importlib
import inspect
import re
from collections import defaultdict

import pytest
import ray
from ray_symbols import PRIVATE, USED, VERSION
from source_imports import ROOT, imports


def test_the_installed_ray_is_the_one_that_the_product_was_tested_with() -> None:
    assert ray.__version__ == VERSION, "run this folder, tests/deployments and tests/launch, then change VERSION"


@pytest.mark.parametrize("lock", ["cpu", "cuda"])
def test_the_lock_files_pin_that_version(lock: str) -> None:
    assert re.findall(r"^ray==([^\s;\\]+)", (ROOT / f"requirements/{lock}.txt").read_text(), re.M) == [VERSION]


def test_what_is_imported_from_inside_ray_is_listed_and_nothing_else() -> None:
    found: dict[str, set[str]] = defaultdict(set)
    for package in ("app", "deployments"):
        for each in imports(package):
            parts = each.module.split(".")
            if parts[0] == "ray" and any(part.startswith("_") or part == "generated" for part in parts):
                found[each.module].add(each.name)
    assert {module: sorted(names) for module, names in found.items()} == {
        module: sorted(names) for module, (names, _) in PRIVATE.items()
    }


@pytest.mark.parametrize("module", PRIVATE)
def test_what_is_imported_is_there(module: str) -> None:
    found = importlib.import_module(module)
    gone = [name for name in sorted(PRIVATE[module][0]) if not hasattr(found, name)]
    assert not gone, f"{module} of ray {ray.__version__} has no {', '.join(gone)}"


@pytest.mark.parametrize("name", USED)
def test_what_is_asked_of_an_object_is_there(name: str) -> None:
    module, _, class_name = name.partition(":")
    found = getattr(importlib.import_module(module), class_name)
    source = inspect.getsource(found)
    gone = [
        each
        for each in sorted(USED[name])
        if not (hasattr(found, each) or each in inspect.get_annotations(found) or re.search(rf"self\.{each}\b", source))
    ]
    assert not gone, f"{class_name} of ray {ray.__version__} has no {', '.join(gone)}"
