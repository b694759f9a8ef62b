"""What another version of a library has moved of the names that app/ and deployments/ lean on, by the module.

`make contracts WHEEL=FILE`. FILE is a wheel of vLLM or Ray, or the folder of an unpacked one. It is compared with what
is installed, and nothing of it is imported.
"""

from __future__ import annotations

import ast
import importlib.util
import re
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import ray_symbols
import vllm_symbols
from library_source import FUNCTIONS, LibrarySource, UnreadableSourceError
from source_imports import Import, imports, modules

Used = Mapping[str, set[str]]
"""From "module:Class" to attributes, as in `vllm_symbols.USED`."""

LIBRARIES: dict[str, Used] = {"vllm": vllm_symbols.USED, "ray": ray_symbols.USED}

NO_USER = "(listed, and used by no module)"


@dataclass
class Moved:
    """What became of names. By a module of the product: sentences."""

    by_module: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    looked_at: int = 0
    """Names and attributes that were compared."""
    rewritten: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    """By a module of the product: functions that are where they were, and whose code is another one."""

    def say(self, leaning: list[str], sentence: str) -> None:
        """Add a sentence for each module that leans on what it is about."""
        for module in leaning or [NO_USER]:
            if sentence not in self.by_module[module]:
                self.by_module[module].append(sentence)

    def lines(self) -> Iterator[str]:
        """Yield what is printed."""
        for module, sentences in sorted(self.by_module.items()):
            yield module
            yield from (f"  {sentence}" for sentence in sentences)
        if self.rewritten:
            yield "Where it was, with other code (read these):"
            for module, names in sorted(self.rewritten.items()):
                yield f"  {module}: {', '.join(names)}"


def compare(old: LibrarySource, new: LibrarySource, imported: list[Import], used: Used) -> Moved:
    """Compare two versions by the names that are imported, and by the attributes that are asked for."""
    moved = Moved()
    leaning: dict[tuple[str, str], set[str]] = defaultdict(set)
    for each in imported:
        leaning[each.module, each.name].add(each.importer)
    for (module, name), importers in sorted(leaning.items()):
        moved.looked_at += 1
        whole = f"{module}.{name}" if name else module
        if not new.has(module, name):
            moved.say(sorted(importers), f"{whole} is gone{_elsewhere(new, name or module.split('.')[-1])}")
        else:
            _compare_code(
                moved,
                sorted(importers),
                whole,
                _node(old.definition(module, name)),
                _node(new.definition(module, name)),
            )
    for class_path, attributes in sorted(used.items()):
        module, _, class_name = class_path.partition(":")
        moved.looked_at += len(attributes)
        if new.definition(module, class_name) is None:
            users = sorted({user for name in attributes for user in users_of(old.library, class_name, name)})
            moved.say(users, f"{module}.{class_name} is gone{_elsewhere(new, class_name)}")
            continue
        had, has = (source.attributes(module, class_name) for source in (old, new))
        for name in sorted(attributes):
            users = users_of(old.library, class_name, name)
            if name not in has:
                moved.say(users, f"{class_name}.{name} is gone")
            else:
                _compare_code(moved, users, f"{class_name}.{name}", had.get(name), has[name])
    return moved


def imported_from(library: str) -> list[Import]:
    """Return what app/ and deployments/ import from a library, but for types alone."""
    return [
        each
        for package in ("app", "deployments")
        for each in imports(package)
        if each.module.split(".")[0] == library and each.when != "types"
    ]


def users_of(library: str, class_name: str, attribute: str) -> list[str]:
    """Return the modules that ask for an attribute: of those, the ones that name its class, if there are any."""
    asked = re.compile(rf"\.{attribute}\b|def {attribute}\b|[\"']{attribute}[\"']|\b{attribute}=")
    asking = {module: text for module, text in _naming(library).items() if asked.search(text)}
    naming = [module for module, text in asking.items() if re.search(rf"\b{class_name}\b", text)]
    return sorted(naming or asking)


@cache
def _naming(library: str) -> dict[str, str]:
    """Source of each module that names a library, in code or in words."""
    texts = {
        module: path.read_text() for module, path in modules().items() if module.startswith(("app.", "deployments."))
    }
    return {module: text for module, text in texts.items() if re.search(rf"(?i)\b{library}\b", text)}


def _node(found: tuple[str, ast.AST] | None) -> ast.AST | None:
    return found[1] if found else None


def _elsewhere(new: LibrarySource, name: str) -> str:
    found = new.modules_with(name)
    return f"; there is one in {', '.join(found[:3])}" if found else ""


def _compare_code(moved: Moved, leaning: list[str], name: str, before: ast.AST | None, after: ast.AST | None) -> None:
    """Say whether a function or a class takes other arguments, and whether a function has other code."""
    was, now = _arguments(before), _arguments(after)
    if was is not None and now is not None and was != now:
        less, more = [each for each in was if each not in now], [each for each in now if each not in was]
        changes = [f"no longer has ({', '.join(less)})"] * bool(less) + [f"has ({', '.join(more)})"] * bool(more)
        moved.say(leaning, f"{name} {', and '.join(changes) or 'has its arguments in another order'}")
    elif isinstance(before, FUNCTIONS) and isinstance(after, FUNCTIONS) and _code(before) != _code(after):
        for module in leaning or [NO_USER]:
            moved.rewritten[module].append(name)


def _arguments(node: ast.AST | None) -> list[str] | None:
    if isinstance(node, ast.ClassDef):
        node = next((each for each in node.body if isinstance(each, FUNCTIONS) and each.name == "__init__"), None)
    if not isinstance(node, FUNCTIONS):
        return None
    kept = node.args
    named = [*kept.posonlyargs, *kept.args]
    values = [None] * (len(named) - len(kept.defaults)) + [f"={ast.unparse(value)}" for value in kept.defaults]
    by_name = [ast.unparse(value) if value else "" for value in kept.kw_defaults]
    return [
        *(
            each.arg + (value or "")
            for each, value in zip(named, values, strict=True)
            if each.arg not in ("self", "cls")
        ),
        *([f"*{kept.vararg.arg}"] if kept.vararg else []),
        *(f"{each.arg}={value}" for each, value in zip(kept.kwonlyargs, by_name, strict=True)),
        *([f"**{kept.kwarg.arg}"] if kept.kwarg else []),
    ]


def _code(node: ast.FunctionDef | ast.AsyncFunctionDef) -> list[str]:
    """A function's statements, without its docstring, comments and layout."""
    return [
        ast.dump(each)
        for each in node.body
        if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))
    ]


def installed(library: str) -> LibrarySource:
    """Return the installed version's source. Raises UnreadableSourceError where there is none."""
    found = importlib.util.find_spec(library)
    if found is None or found.origin is None:
        raise UnreadableSourceError(f"{library} is not installed here: there is nothing to compare with")
    return LibrarySource(Path(found.origin).parents[1], library)


def other(where: Path) -> LibrarySource:
    """Return the version that lies in a wheel or a folder. Raises UnreadableSourceError where neither library does."""
    if not where.exists():
        raise UnreadableSourceError(f"{where} does not exist; `pip download --no-deps vllm==VERSION` brings a wheel")
    for library in LIBRARIES:
        try:
            return LibrarySource(where, library)
        except UnreadableSourceError as error:
            reason = error
    raise UnreadableSourceError(f"{where} holds neither vllm nor ray") from reason


def main(words: list[str]) -> int:
    """Print what moved; 0: nothing did, 1: something, 2: nothing could be compared."""
    if len(words) != 1:
        print("say which wheel: make contracts WHEEL=FILE", file=sys.stderr)
        return 2
    try:
        new = other(Path(words[0]))
        old = installed(new.library)
    except UnreadableSourceError as error:
        print(error, file=sys.stderr)
        return 2
    moved = compare(old, new, imported_from(new.library), LIBRARIES[new.library])
    for line in moved.lines():
        print(line)
    print(
        f"{new.library} {old.version or '?'} → {new.version or '?'}: {moved.looked_at} names and attributes compared; "
        f"{len({each for said in moved.by_module.values() for each in said})} moved, for {len(moved.by_module)} modules"
    )
    return 1 if moved.by_module else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
