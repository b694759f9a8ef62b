"""A library's names, read from its files: a wheel, or a folder with its packages. Nothing of it is imported.

So another version can be looked at that is not installed, on a machine that could not run it.
"""

from __future__ import annotations

import ast
import re
import zipfile
from collections.abc import Iterable, Iterator
from functools import cache, cached_property
from pathlib import Path

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BLOCKS = (ast.If, ast.Try, ast.With)


class UnreadableSourceError(ValueError):
    """What was named is no wheel and no folder that holds the library."""


class LibrarySource:
    """One version of a library. `library` is the name that it is imported by."""

    def __init__(self, where: Path, library: str) -> None:
        """Raises UnreadableSourceError where the library is not in it."""
        self.library = library
        if where.is_dir():
            self._root: Path | zipfile.Path = where
        elif zipfile.is_zipfile(where):
            self._archive = zipfile.ZipFile(where)
            self._root = zipfile.Path(self._archive)
        else:
            raise UnreadableSourceError(f"{where} is no wheel and no folder of an unpacked one")
        if not self._exists(f"{library}/__init__.py"):
            raise UnreadableSourceError(f"{where} has no package {library}")

    @cached_property
    def version(self) -> str:
        """Version by the wheel's metadata; empty where there is none."""
        for folder in self._root.iterdir():
            if re.fullmatch(rf"{self.library}(_cpu)?-.*\.dist-info", folder.name):
                found = re.search(r"^Version: (.+)$", self._text(f"{folder.name}/METADATA"), re.MULTILINE)
                return found[1].strip() if found else ""
        return ""

    def has(self, module: str, name: str = "") -> bool:
        """Whether `from module import name` finds something; without a name, whether there is the module."""
        if not name:
            return self._file_of(module) is not None
        return name in self._names(module) or self._file_of(f"{module}.{name}") is not None

    def definition(self, module: str, name: str) -> tuple[str, ast.AST] | None:
        """Return the module in which a name is defined, and its definition, wherever it is imported from."""
        for _ in range(10):  # a name is handed on by a few packages at most
            found = self._names(module).get(name)
            if found is None or not isinstance(found, ast.ImportFrom):
                return (module, found) if found is not None else None
            name = next((alias.name for alias in found.names if (alias.asname or alias.name) == name), name)
            module = self._absolute(module, found)
        return None

    def attributes(self, module: str, class_name: str) -> dict[str, ast.AST]:
        """Return an object's attributes: methods, fields, what is set on `self`; its bases' included."""
        found = self.definition(module, class_name)
        if found is None or not isinstance(found[1], ast.ClassDef):
            return {}
        module, definition = found
        own: dict[str, ast.AST] = {}
        for base in definition.bases:
            if isinstance(base, ast.Subscript):
                base = base.value
            if isinstance(base, ast.Name) and base.id != class_name:
                own |= self.attributes(module, base.id)
        return own | _members(definition)

    def modules_with(self, name: str) -> list[str]:
        """Return the modules that define a name at their top."""
        pattern = re.compile(rf"^\s*(?:class|def|async def)\s+{name}\b|^{name}\s*[:=]", re.MULTILINE)
        found = []
        for path in self._all_files():
            if pattern.search(self._text(path)):
                module = path.removesuffix("/__init__.py").removesuffix(".py").replace("/", ".")
                definition = self._names(module).get(name)
                if definition is not None and not isinstance(definition, ast.ImportFrom):
                    found.append(module)
        return found

    def _all_files(self) -> Iterator[str]:
        if isinstance(self._root, Path):
            paths = (str(path.relative_to(self._root)) for path in (self._root / self.library).rglob("*.py"))
        else:
            paths = (name for name in self._archive.namelist() if name.startswith(f"{self.library}/"))
        return iter(sorted(path for path in paths if path.endswith(".py")))

    def _exists(self, path: str) -> bool:
        return (self._root / path).is_file()

    def _text(self, path: str) -> str:
        return (self._root / path).read_text(encoding="utf-8")

    @cache  # noqa: B019 - two of these live, as long as the program
    def _file_of(self, module: str) -> str | None:
        path = module.replace(".", "/")
        return next((each for each in (f"{path}.py", f"{path}/__init__.py") if self._exists(each)), None)

    @cache  # noqa: B019
    def _names(self, module: str) -> dict[str, ast.AST]:
        """Names at a module's top, those for types too: packages name there what they import once it is asked for."""
        path = self._file_of(module)
        if path is None:
            return {}
        text = self._text(path)
        names: dict[str, ast.AST] = {}
        for node in _statements(ast.parse(text).body):
            if isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
                names |= self._names(self._absolute(module, node))
            else:
                names |= dict.fromkeys(_bound(node), node)
        if module.endswith("_pb2"):  # protobuf makes the classes when the module is loaded, from text
            names |= {name: ast.Constant(name) for name in re.findall(r"[A-Z]\w+", text)}
        return names

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        path = self._file_of(module) or ""
        package = module.split(".") if path.endswith("__init__.py") else module.split(".")[:-1]
        package = package[: len(package) - (node.level - 1)]
        return ".".join([*package, node.module] if node.module else package)


def _statements(body: Iterable[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements at a module's or class's top, those of its branches included."""
    for node in body:
        yield node
        if isinstance(node, BLOCKS):
            for part in ("body", "orelse", "finalbody"):
                yield from _statements(getattr(node, part, []))
            for handler in getattr(node, "handlers", []):
                yield from _statements(handler.body)


def _bound(node: ast.AST) -> list[str]:
    """Names that a statement binds."""
    if isinstance(node, (*FUNCTIONS, ast.ClassDef)):
        return [node.name]
    if isinstance(node, (ast.Import, ast.ImportFrom)):
        return [(alias.asname or alias.name).split(".")[0] for alias in node.names]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [part.id for target in targets if target for part in ast.walk(target) if isinstance(part, ast.Name)]


def _members(definition: ast.ClassDef) -> dict[str, ast.AST]:
    found: dict[str, ast.AST] = {}
    for node in _statements(definition.body):
        if isinstance(node, FUNCTIONS):
            for part in ast.walk(node):
                if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Store) and _is_self(part.value):
                    found.setdefault(part.attr, part)
        found |= dict.fromkeys(_bound(node), node)
    return found


def _is_self(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and node.id == "self"
