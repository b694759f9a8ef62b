"""A test's wait for what may hang scales with the machine: `load_tests.harness.patience`, no fixed number of seconds.

On one busy core what takes seconds elsewhere takes minutes. Limits below `LEAST_S` are what their tests are about; from
`MOST_S` on it is no wait, but a time that a test pretends has passed.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from configs.model_folder import PROJECT_ROOT

LEAST_S = 20
MOST_S = 3600
TESTS = PROJECT_ROOT / "tests"
OTHER_PYTHONS = TESTS / "end_to_end" / "clients" / "scripts"
"""What is run without the project's packages."""
KEYWORDS = ("timeout", "timeout_s")
SECOND = ("wait_for", "wait_procs")
"""Calls whose second argument is the limit; of `FIRST` it is the only one."""
FIRST = ("timeout", "result", "join", "wait", "flush", "find")


def _limits(node: ast.AST) -> Iterator[ast.expr]:
    """What says how long a call may take, or when a wait ends: `time.monotonic() + limit`."""
    if isinstance(node, ast.BinOp) and ast.unparse(node.left).endswith(".monotonic()"):
        yield node.right
    if isinstance(node, ast.Call):
        yield from _limits_of_call(node)


def _limits_of_call(call: ast.Call) -> Iterator[ast.expr]:
    method = isinstance(call.func, ast.Attribute) and not isinstance(call.func.value, ast.Constant)  # ", ".join(words)
    called = call.func.attr if method else ""
    if ast.unparse(call.func) != "pytest.mark.timeout":  # the one limit of real seconds
        yield from (word.value for word in call.keywords if word.arg in KEYWORDS)
        yield from call.args[:1] if called in FIRST and len(call.args) == 1 else ()
        yield from call.args[1:] if called in SECOND and len(call.args) == 2 else ()


def _number(value: ast.expr, constants: Mapping[str, float] = {}) -> float:
    """Seconds that are written, by themselves, by name, or as a part or a multiple of these; 0 for anything else."""
    match value:
        case ast.Constant(value=int() | float() as number):
            return number
        case ast.Name(id=name):
            return constants.get(name, 0.0)
        case ast.BinOp(left=left, op=ast.Mult(), right=right):
            return _number(left, constants) * _number(right, constants)
        case ast.BinOp(left=left, op=ast.Div(), right=right):
            return _number(left, constants) / (_number(right, constants) or 1.0)
    return 0.0


def _constants(modules: Iterable[ast.Module]) -> dict[str, float]:
    """Numbers that modules give a name; the longest of those with one name."""
    found: dict[str, float] = {}
    for node in (node for module in modules for node in module.body if isinstance(node, ast.Assign)):
        for name in (target.id for target in node.targets if isinstance(target, ast.Name)):
            found[name] = max(found.get(name, 0.0), _number(node.value))
    return found


def _fixed(module: ast.Module, elsewhere: Mapping[str, float]) -> list[int]:
    """The lines whose limit is a number, or a name for one, here or `elsewhere`."""
    constants = {**elsewhere, **_constants([module])}
    limits = [limit for node in ast.walk(module) for limit in _limits(node)]
    return sorted(limit.lineno for limit in limits if LEAST_S <= _number(limit, constants) < MOST_S)


def _parsed() -> dict[Path, ast.Module]:
    paths = [path for path in TESTS.rglob("*.py") if OTHER_PYTHONS not in path.parents]
    return {path.relative_to(PROJECT_ROOT): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def test_no_test_waits_for_a_fixed_time() -> None:
    modules = _parsed()
    constants = _constants(modules.values())
    fixed = [f"{path}:{line}" for path, module in modules.items() for line in _fixed(module, constants)]
    assert not fixed, "such a limit is `patience(seconds)`: " + ", ".join(fixed)


def test_what_is_found() -> None:
    written = """
WAIT_S = 60.0
SOON_S = 1.0
httpx.get(url, timeout=60)
asyncio.wait_for(answer, 120)
thread.join(WAIT_S)
asyncio.timeout(30)
thread.join(SOON_S)
httpx.get(url, timeout=patience(60))
pytest.mark.timeout(600)
", ".join(WORDS)
WORDS = 40
end = time.monotonic() + 60
end = time.monotonic() + 7200
port.flush(30)
client.find(WAIT_S / 2)
client.find(2 * SOON_S)
found = words.find("60")
port.flush(patience(WAIT_S) / 3)
"""
    module = ast.parse(written)
    assert _fixed(module, {}) == [4, 5, 6, 7, 13, 15, 16]
