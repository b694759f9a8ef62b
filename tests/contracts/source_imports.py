"""Who imports whom, read from the source: nothing of the project is imported for it."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("app", "configs", "deployments", "kernels", "kvmanager", "load_tests", "models")


@dataclass(frozen=True)
class Import:
    """One imported name. `when`: at the "top", in a "function", or for "types" alone (`if TYPE_CHECKING`)."""

    importer: str
    module: str
    name: str
    """Empty where the module itself is imported."""
    when: str

    def __str__(self) -> str:
        when = {"top": "", "function": ", in a function", "types": ", for types"}[self.when]
        return f"{self.importer} imports {self.module}{when}"


def source_files(*folders: str) -> list[Path]:
    """Python files below these folders of the project, in order."""
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py") if "build" not in path.parts)


@cache
def modules() -> dict[str, Path]:
    """The project's own modules by dotted name; a package has its `__init__`."""
    found = {}
    for path in source_files(*PACKAGES):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(package: str) -> list[Import]:
    """All imports of a package's modules. `from a import b` is of module `a.b` where that is one of ours."""
    found: list[Import] = []
    for module, path in modules().items():
        if module.split(".")[0] == package:
            found += _found(module, ast.parse(path.read_text()).body, "top")
    return found


def own(package: str) -> Iterator[Import]:
    """Those of the project's own modules, but for a module's own package."""
    for each in imports(package):
        if each.module in modules() and each.module != each.importer:
            yield each


def _found(importer: str, body: Iterable[ast.AST], when: str) -> Iterator[Import]:
    for node in body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield Import(importer, alias.name, "", when)
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"{importer}: relative imports are not read"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                known = whole in modules()
                yield Import(importer, whole if known else node.module, "" if known else alias.name, when)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            yield from _found(importer, node.body, "types")
            yield from _found(importer, node.orelse, when)
        else:
            inside = "function" if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) else when
            yield from _found(importer, ast.iter_child_nodes(node), inside)


def circles(edges: dict[str, set[str]]) -> list[set[str]]:
    """Groups of modules that reach each other (Tarjan, *Depth-first search and linear graph algorithms*, 1972)."""
    number: dict[str, int] = {}
    lowest: dict[str, int] = {}
    path: list[str] = []
    found: list[set[str]] = []

    def visit(module: str) -> None:
        number[module] = lowest[module] = len(number)
        path.append(module)
        for other in edges.get(module, ()):
            if other not in number:
                visit(other)
                lowest[module] = min(lowest[module], lowest[other])
            elif other in path:
                lowest[module] = min(lowest[module], number[other])
        if lowest[module] == number[module]:
            group = set(path[path.index(module) :])
            del path[path.index(module) :]
            if len(group) > 1:
                found.append(group)

    for module in edges:
        if module not in number:
            visit(module)
    return found
