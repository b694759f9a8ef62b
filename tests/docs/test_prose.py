"""The documentation is written to be read: short sentences, narrow lines, no diary."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # pytest's importlib mode leaves the modules beside tests unimportable

import pages

from configs.settings import Settings

MOST_WORDS = 30
MOST_COLUMNS = 140
MOST_README_LINES = 80
MOST_ARCHITECTURE_WORDS = 1_200
WORN = ("asked", "beside it", "manieth")
ODD = re.compile(r"\b(beside|shall|anew|so (?:many|much|long)|nobody|somebody|whoever|whom)\b", re.IGNORECASE)
"""What the field's prose hardly says; `tests/contracts/test_words.py` counts it in the source."""
_DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b|\b(?:January|February|March|April|June|July|August|September|October|"
                   r"November|December) (?:\d{1,2}, )?20\d\d\b")  # fmt: skip

PAGES = pytest.mark.parametrize("page", pages.documentation())


@PAGES
def test_no_sentence_is_longer_than_a_breath(page: str) -> None:
    long = [one for one in pages.sentences(pages.read(page)) if pages.words(one) > MOST_WORDS]
    assert not long


@PAGES
def test_no_line_is_wider_than_a_screen(page: str) -> None:
    lines = pages.running_text(pages.read(page)).splitlines()
    assert not [line for line in lines if len(line) > MOST_COLUMNS]


@PAGES
def test_no_worn_word_is_used(page: str) -> None:
    text = " ".join(pages.sentences(pages.read(page))).lower()
    assert not [word for word in WORN if re.search(rf"\b{word}\b", text)]


@pytest.mark.parametrize("page", [page for page in pages.documentation() if page != "CHANGELOG.md"])
def test_no_odd_word_stands_on_a_page(page: str) -> None:
    """Neither in tables nor in headings."""
    text = " ".join(re.sub(r"`[^`]*`", "", pages.without_code(pages.read(page))).split())
    assert not ODD.findall(text)


@pytest.mark.parametrize("page", [page for page in pages.documentation() if page not in pages.HISTORY])
def test_no_date_stands_in_the_running_text(page: str) -> None:
    assert not _DATE.findall(pages.without_captions(pages.read(page)))


def test_the_readme_and_the_architecture_page_stay_short() -> None:
    assert len(pages.read("README.md").splitlines()) <= MOST_README_LINES
    assert len(pages.read("docs/concepts/architecture.md").split()) <= MOST_ARCHITECTURE_WORDS


def test_the_settings_descriptions_are_held_to_the_same() -> None:
    long = [one for text in _descriptions(Settings) for one in pages.sentences(text) if pages.words(one) > MOST_WORDS]
    assert not long


def _descriptions(tree: type) -> list[str]:
    found: list[str] = []
    for field in tree.model_fields.values():
        found.append(field.description or "")
        if hasattr(field.annotation, "model_fields"):
            found += _descriptions(field.annotation)
    return found


def test_the_checks_see_what_they_are_for() -> None:
    long = "A " + "very " * 30 + "long one."
    text = f"# A heading\n\nShort. {long} `a b c` [link text](to.md).\n\n| {long} |\n\n```\n{long}\n```\n"
    assert [one for one in pages.sentences(text) if pages.words(one) > MOST_WORDS] == [long[:-1]]
    assert ODD.findall("Nobody stands beside it, so long.") == ["Nobody", "beside", "so long"]
    assert _DATE.findall("Until 2026-11-22 it was so, and in November 2026.") == ["2026-11-22", "November 2026"]
