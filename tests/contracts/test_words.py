"""The source speaks the field's plain English: what vLLM, Starlette and httpx hardly say is hardly said here.

    python tests/contracts/test_words.py

prints each place.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from source_imports import PACKAGES, ROOT, source_files

ODD = re.compile(r"\b(beside|shall|so (?:many|much|long)|anew|nobody|somebody|whoever)\b", re.IGNORECASE)
TEXTS_OF_MODELS = frozenset(
    {
        "app/cli/doctor/rules/ordinary_text.py",
        "app/cli/demo/documents.py",
        "load_tests/workloads/words.py",
    }
)
"""Where a model's language stands, not ours."""


def places() -> Iterator[str]:
    """Every odd word in the product and the load tests, as `path:line: word`."""
    for path in source_files(*(package for package in PACKAGES if package != "models")):
        if str(path.relative_to(ROOT)) in TEXTS_OF_MODELS:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            for found in ODD.finditer(line):
                yield f"{path.relative_to(ROOT)}:{number}: {found[1]}"


def test_no_odd_word_is_said() -> None:
    found = list(places())
    assert not found, "\n".join(found)


if __name__ == "__main__":
    print("\n".join(places()))
