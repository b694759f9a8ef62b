"""A plugin of pytest for the runs of mutants: it writes down what failed and by which error, a line of JSON each.

It refuses to run where the project's packages would not be imported from the current folder, which is the copy that
holds the mutant: an environment in which the project is installed would test that instead.
"""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

FAILURES = "CROSSKV_MUTANT_FAILURES"
"""Variable of the environment that names the file."""
PACKAGES = ("app", "configs", "deployments", "kernels", "kvmanager", "load_tests", "models")


def pytest_sessionstart() -> None:
    here = Path.cwd().resolve()
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        places = list(spec.submodule_search_locations or ()) if spec is not None else []
        if not places or Path(places[0]).resolve() != here / package:
            raise pytest.UsageError(f"{package} would be imported from {places}, not from {here}")


def pytest_exception_interact(node: Any, call: Any, report: Any) -> None:
    failure = {
        "test": node.nodeid,
        "when": getattr(report, "when", "collect"),
        "errors": [each.__name__ for each in call.excinfo.type.__mro__],
    }
    with Path(os.environ[FAILURES]).open("a", encoding="utf-8") as file:
        file.write(json.dumps(failure) + "\n")
