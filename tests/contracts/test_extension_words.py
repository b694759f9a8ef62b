"""An extension's name stands in its own folders and in few files elsewhere: what prints, routes or registers it."""

from __future__ import annotations

import pytest
from source_imports import modules

MOST = 8
"""Files of the product outside an extension's folders that may have its name, in code or in words."""
OWN_FOLDERS = {"blend", "blending", "sparse", "sparser", "extensions"}
ROOMS = ("app", "deployments", "kvmanager")
METRICS = "app.metrics"
"""Names and texts of the metrics of everything."""


def naming(word: str) -> list[str]:
    """Modules of the product that name an extension, outside its folders and the metrics."""
    return [
        module
        for module, path in sorted(modules().items())
        if module.split(".")[0] in ROOMS
        and not f"{module}.".startswith(f"{METRICS}.")
        and not OWN_FOLDERS & set(module.split("."))
        and word in path.read_text(encoding="utf-8").lower()
    ]


@pytest.mark.parametrize("word", ["blend", "sparse"])
def test_few_files_name_an_extension(word: str) -> None:
    found = naming(word)
    assert found, "the extension has another name"
    assert len(found) <= MOST, found
