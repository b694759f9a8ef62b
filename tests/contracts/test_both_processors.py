"""What asks which machine this is, is tested as if it ran on either kind of processor."""

from __future__ import annotations

import pytest
from source_imports import PACKAGES, ROOT, imports

ASKING = {
    "app.builder": "tests/app/test_builder.py",
    "app.control.settings_shown": "tests/app/control/test_settings_shown.py",
    "app.launch.memory": "tests/app/launch/test_launch_memory.py",
    "app.launch.plan": "tests/app/launch/test_plan.py",
    "configs.settings": "tests/configs/test_settings.py",
    "load_tests.bench.arms": "tests/load_tests/bench/test_bench.py",
    "load_tests.bench.choice": "tests/load_tests/bench/test_bench.py",
    "load_tests.bench.report": "tests/load_tests/bench/test_bench.py",
    "load_tests.experiments.sizes": "tests/load_tests/experiments/test_experiments.py",
    "load_tests.measuring.processes": "tests/load_tests/measuring/test_measuring.py",
    "load_tests.peers.engine": "tests/load_tests/peers/test_peers.py",
    "load_tests.peers.serve_llm": "tests/load_tests/peers/test_peers.py",
}
"""Modules that import `configs.machine`, and a test of each that takes `each_processor`."""


def test_every_module_that_asks_for_the_machine_is_known() -> None:
    found = {one.importer for package in PACKAGES for one in imports(package) if one.module == "configs.machine"}
    assert found == ASKING.keys()


@pytest.mark.parametrize("test", sorted(set(ASKING.values())))
def test_it_is_tested_under_both_processors(test: str) -> None:
    assert "each_processor" in (ROOT / test).read_text()


def test_a_test_that_takes_it_runs_under_both(request: pytest.FixtureRequest) -> None:
    (definition,) = request._fixturemanager.getfixturedefs("each_processor", request.node)
    assert set(definition.params) == {"float32", "bfloat16"}
