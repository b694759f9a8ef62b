"""A class is found by its name: no two of the product have the same one."""

from __future__ import annotations

import ast
from collections import defaultdict

from source_imports import PACKAGES, ROOT, source_files

PRODUCT = [package for package in PACKAGES if package not in ("load_tests", "models")]


def test_no_class_name_occurs_twice() -> None:
    found: dict[str, list[str]] = defaultdict(list)
    for path in source_files(*PRODUCT):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.ClassDef):
                found[node.name].append(str(path.relative_to(ROOT)))
    assert {name: paths for name, paths in found.items() if len(paths) > 1} == {}
