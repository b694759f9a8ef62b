"""The pages of the documentation, and their text without tables, code and markup."""

from __future__ import annotations

import re
import subprocess
from functools import cache
from pathlib import Path

from configs.model_folder import PROJECT_ROOT

_FENCE = re.compile(r"^ *```.*?^ *```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_HEADING = re.compile(r"^#+ .*$", re.MULTILINE)
_TABLE_ROW = re.compile(r"^ *\|.*$", re.MULTILINE)
_IMAGE = re.compile(r"!\[[^\]]*\]\([^)]*\)")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_CODE = re.compile(r"`[^`]*`")
_LIST_ITEM = re.compile(r"^ *(?:[-*]|\d+\.) +", re.MULTILINE)
_SENTENCE_END = re.compile(r"[.!?][\"')*]*\s+(?=[\"'(*]*[A-Z0-9`])")


HISTORY = frozenset({"docs/measured/journal.md", "CHANGELOG.md"})
"""Pages that tell what was, with dates; the others say what is."""


@cache
def tracked() -> frozenset[str]:
    """Every file of the project that git knows or would add, by its path from the root."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=PROJECT_ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return frozenset(line for line in listed.stdout.splitlines() if (PROJECT_ROOT / line).is_file())


def markdown() -> list[str]:
    """Every Markdown file."""
    return sorted(path for path in tracked() if path.endswith(".md"))


def documentation() -> list[str]:
    """What is written for people: README.md, SECURITY.md, CONTRIBUTING.md and everything below docs/."""
    return [path for path in markdown() if "/" not in path or path.startswith("docs/")]


def read(path: str) -> str:
    return (PROJECT_ROOT / path).read_text()


def without_code(text: str) -> str:
    """The page without its fenced blocks and comments."""
    return _COMMENT.sub("", _FENCE.sub("", text))


def running_text(text: str) -> str:
    """The page's paragraphs and list items alone."""
    return _TABLE_ROW.sub("", _HEADING.sub("\n", without_code(text)))


def without_captions(text: str) -> str:
    """The running text without the paragraphs in italics, which say how a table or picture came to be."""
    return "\n\n".join(
        part
        for part in re.split(r"\n\s*\n", running_text(text))
        if not re.fullmatch(r"\*[^*].*\*", part.strip(), re.DOTALL)
    )


def sentences(text: str) -> list[str]:
    """The sentences of the running text; a link counts as its words, a piece of code as one."""
    plain = _CODE.sub("Code", _LINK.sub(r"\1", _IMAGE.sub("", running_text(text))))
    paragraphs = re.split(r"\n\s*\n", _LIST_ITEM.sub("\n\n", plain))
    return [one for part in paragraphs for one in _SENTENCE_END.split(" ".join(part.split())) if one]


def words(sentence: str) -> int:
    return sum(any(sign.isalnum() for sign in word) for word in sentence.split())


def in_backticks(text: str) -> list[str]:
    """What stands in backticks on one line, outside fenced blocks."""
    return [found[1:-1] for found in _CODE.findall(without_code(text)) if "\n" not in found]


def anchors(text: str) -> set[str]:
    """The names that GitHub gives a page's headings."""
    found: set[str] = set()
    for heading in re.findall(r"^#+ +(.*)$", _FENCE.sub("", text), re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", _LINK.sub(r"\1", heading).lower()).strip().replace(" ", "-")
        count = 0
        while (unique := name if not count else f"{name}-{count}") in found:
            count += 1
        found.add(unique)
    return found


def resolved(page: str, target: str) -> Path:
    """The file that a relative link on `page` leads to."""
    return (PROJECT_ROOT / page).parent / target
