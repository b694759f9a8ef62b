"""The core is read, and works, without its extensions: few modules outside an extension's folder may import it.

What is imported by name, in a string, is held too: the paths of `kv.load_paths` are, in one table.
"""

from __future__ import annotations

import ast

import pytest
from source_imports import Import, modules, own

PATHS = "deployments.engine.load_paths"
ALLOWED: dict[str, set[str]] = {
    f"{PATHS}.states": set(),
    f"{PATHS}.sparse": {"app.metrics.catalogue"},
    f"{PATHS}.blending": {"app.metrics.catalogue"},
    f"{PATHS}.preempted": {"app.metrics.catalogue"},
    f"{PATHS}.layerwise": set(),
    "deployments.segment_store.sparse": {
        f"{PATHS}.sparse",
    },
    "kernels.sparse": {f"{PATHS}.sparse", "deployments.segment_store.sparse"},
    "kernels.blend": {f"{PATHS}.blending"},
    "kvmanager.extensions.states": {
        f"{PATHS}.states",
        "deployments.replica.extensions.states",
        "app.extensions.states",
    },
    "kvmanager.extensions.sparse": {
        f"{PATHS}.sparse",
        "deployments.replica.extensions.sparse",
        "deployments.segment_store.sparse",
    },
    "kvmanager.extensions.blend": {
        f"{PATHS}.blending",
        "deployments.replica.extensions.blend",
        "app.extensions.blend",
    },
    "app.extensions.states": set(),
    "app.extensions.blend": set(),
    "deployments.replica.extensions.states": set(),
    "deployments.replica.extensions.sparse": set(),
    "deployments.replica.extensions.blend": set(),
    "deployments.protocol.extensions.blend_request": {
        "deployments.replica.extensions.blend",
        "app.extensions.blend",
    },
}
"""By extension, the modules and rooms of the product outside it that may import it. Metrics have texts for the docs.

A new one belongs here only if the core cannot know the extension by an interface: `LoadPath`,
`StoredForm`, `ReplicaExtension`, `PlanExtension`."""
NAMED_IN = {
    f"{PATHS}.parts",
    "app.extensions",
    "deployments.replica.extensions",
    "deployments.segment_store.stored_form",
    "kvmanager.extensions",
}
"""Modules that have an extension's dotted name in a string."""
PRODUCT = ("app", "configs", "deployments", "kernels", "kvmanager")


def within(module: str, room: str) -> bool:
    return f"{module}.".startswith(f"{room}.")


def outside(extension: str) -> list[Import]:
    """Imports of an extension by modules of the product outside it, for types too."""
    return [
        each
        for package in PRODUCT
        for each in own(package)
        if within(each.module, extension) and not within(each.importer, extension)
    ]


@pytest.mark.parametrize("extension", ALLOWED)
def test_nothing_else_imports_an_extension(extension: str) -> None:
    allowed = ALLOWED[extension]
    found = outside(extension)
    assert [str(each) for each in found if not any(within(each.importer, room) for room in allowed)] == []


@pytest.mark.parametrize("extension", ALLOWED)
def test_what_is_allowed_is_done(extension: str) -> None:
    importers = {each.importer for each in outside(extension)}
    idle = {room for room in ALLOWED[extension] if not any(within(module, room) for module in importers)}
    assert idle == set(), "an exception that nothing needs is no exception"
    assert any(within(module, extension) for module in modules()), "the extension has moved"


def test_extensions_are_named_in_one_table() -> None:
    found = set()
    for module, path in modules().items():
        if module.split(".")[0] not in PRODUCT:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            text = node.value if isinstance(node, ast.Constant) else None
            if isinstance(text, str) and any(within(text, extension) for extension in ALLOWED):
                found.add(module)
    assert found == NAMED_IN
