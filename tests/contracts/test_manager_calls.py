"""Calls of the KV manager by name: each names a method that its actor has, and each call of its API one that is there.

`getattr` on an actor's handle raises only when the call is made, where the caller goes on without the manager.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from deployments.manager.actor import KVManagerActor
from deployments.manager.control import ManagerApi

ROOT = Path(__file__).resolve().parents[2]
CALLERS = ("ask", "ask_blocking", "tell", "_ask")
MANAGERS = ("manager", "_manager", "tiers")
"""Attributes that hold a `ManagerClient`, or what asks a manager as it does (`load_tests.harness.tiers`)."""


def named_calls() -> Iterator[tuple[str, str, str]]:
    """Where a method of the manager is named, its name, and of a call of its API that one's name."""
    for package in ("app", "deployments", "load_tests"):
        for path in sorted((ROOT / package).rglob("*.py")):
            for call in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                for caller, args in handed_on(call):
                    names = [arg.value for arg in args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
                    if caller.attr not in CALLERS or not args or not isinstance(args[0], ast.Constant):
                        continue
                    owner = caller.value
                    held = owner.attr if isinstance(owner, ast.Attribute) else getattr(owner, "id", "")
                    if held in MANAGERS:
                        yield f"{path.relative_to(ROOT)}:{call.lineno}", names[0], names[1] if len(names) > 1 else ""
                    elif path.name == "manager_control.py":
                        yield f"{path.relative_to(ROOT)}:{call.lineno}", "api", names[0]


def handed_on(call: ast.AST) -> Iterator[tuple[ast.Attribute, list[ast.expr]]]:
    """What is called with what: the call itself, and a method that it is given, as `to_thread(manager.ask, "plan")`."""
    if isinstance(call, ast.Call):
        for place, caller in enumerate([call.func, *call.args]):
            if isinstance(caller, ast.Attribute):
                yield caller, call.args[place:]


@pytest.fixture(scope="module")
def calls() -> list[tuple[str, str, str]]:
    return list(named_calls())


def test_the_calls_are_found(calls: list[tuple[str, str, str]]) -> None:
    assert {"plan", "offer", "register_replica", "acknowledge", "api", "deltas"} <= {name for _, name, _ in calls}
    assert {"move", "drain", "pin"} <= {name for _, method, name in calls if method == "api"}


def test_the_manager_has_what_is_called(calls: list[tuple[str, str, str]]) -> None:
    assert [one for one in calls if not hasattr(KVManagerActor, one[1])] == []
    has = ManagerApi(*(Mock() for _ in range(4))).calls
    assert [one for one in calls if one[1] == "api" and one[2] and one[2] not in has] == []
