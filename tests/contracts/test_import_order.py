"""Imports point down: between packages, between a package's rooms, by type hints too.

`python tests/contracts/test_import_order.py` prints the floors and what each room imports.
"""

from __future__ import annotations

from collections import defaultdict

import pytest
from source_imports import PACKAGES, Import, circles, modules, own

FLOORS: dict[str, list[list[str]]] = {
    "": [["load_tests"], ["app"], ["deployments"], ["kvmanager", "models"], ["configs", "kernels"]],
    "app": [
        ["app"],
        ["app.cli"],
        ["app.extensions"],
        ["app.control"],
        ["app.launch"],
        ["app.openai"],
        ["app.answers", "app.continuation", "app.events", "app.observe", "app.divergence"],
        ["app.backend", "app.dialects"],
        ["app.gate"],
        ["app.checks", "app.metrics", "app.page"],
    ],
    "deployments": [
        ["deployments.router", "deployments.replica", "deployments.redis_tier", "deployments.scaling"],
        ["deployments.engine", "deployments.manager"],
        ["deployments.engine.pool", "deployments.port"],
        ["deployments.cpu_tier", "deployments.transfer"],
        ["deployments.segment_store", "deployments.protocol"],
    ],
    "kvmanager": [
        ["kvmanager"],
        ["kvmanager.extensions"],
        ["kvmanager.scheduling", "kvmanager.views"],
        ["kvmanager.loading"],
        ["kvmanager.moves", "kvmanager.routing", "kvmanager.eviction", "kvmanager.scaling"],
        ["kvmanager.index"],
        ["kvmanager.segments"],
    ],
    "kernels": [
        ["kernels.benchmark", "kernels.sparse"],
        ["kernels.codecs"],
        ["kernels.blend", "kernels.entropy", "kernels.paged", "kernels.rope"],
        ["kernels"],
    ],
}
"""Top to bottom. A module imports what is in its own room or further down; rooms of one floor know nothing of each
other. A package's own name stands for the modules that lie in none of its rooms."""

TOGETHER: list[set[str]] = [
    # One structure in three files: a copy knows its store, a store lists its copies, a policy puts them in order.
    {"kvmanager.index.nodes", "kvmanager.index.stores", "kvmanager.index.eviction_policy"},
    # A path hears of requests, and a request remembers which path has proposed what.
    {"deployments.engine.load_paths.base", "deployments.engine.tracked_request"},
]
"""Modules that name each other in type hints."""


def room_of(module: str, package: str) -> str:
    """The room that FLOORS has for a module: the most inward one."""
    names = [name for floor in FLOORS[package] for name in floor]
    inside = [name for name in names if f"{module}.".startswith(f"{name}.")]
    assert inside, f"{module} lies in no room of FLOORS[{package!r}]: say which floor it belongs to"
    return max(inside, key=len)


def upward(package: str) -> list[Import]:
    """Imports that FLOORS forbids. "": between packages."""
    level = {name: number for number, floor in enumerate(FLOORS[package]) for name in floor}
    found = []
    for each in (each for name in ([package] if package else PACKAGES) for each in own(name)):
        if package and not f"{each.module}.".startswith(f"{package}."):
            continue
        importer, imported = room_of(each.importer, package), room_of(each.module, package)
        if importer != imported and level[importer] >= level[imported]:
            found.append(each)
    return found


@pytest.mark.parametrize("package", FLOORS, ids=lambda package: package or "packages")
def test_imports_point_down(package: str) -> None:
    assert [str(each) for each in upward(package)] == []


def test_every_folder_has_a_floor() -> None:
    for module in modules():
        package = module.split(".")[0]
        room_of(module, "")
        if package in FLOORS and module != package:
            room_of(module, package)


def test_no_module_of_the_product_leads_back_to_itself() -> None:
    edges = defaultdict(set)
    for package in sorted({*PACKAGES} - {"load_tests"}):
        for each in own(package):
            edges[each.importer].add(each.module)
    assert [sorted(group) for group in circles(edges) if group not in TOGETHER] == []


def report() -> str:
    """The floors, and beside each room the rooms that it imports."""
    lines = []
    for package, floors in FLOORS.items():
        arrows = defaultdict(set)
        for name in [package] if package else PACKAGES:
            for each in own(name):
                if not package or each.module.split(".")[0] == package:
                    arrows[room_of(each.importer, package)].add(room_of(each.module, package))
        lines.append(package or "packages")
        for number, floor in enumerate(floors):
            for room in floor:
                below = sorted(name.removeprefix(f"{package}.") for name in arrows[room] - {room})
                lines.append(f"  {len(floors) - number}  {room.removeprefix(f'{package}.'):<14} {', '.join(below)}")
        lines.append(f"  up or sideways: {len(upward(package))}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(report())
