"""What a measurement is handed over as: a Markdown table for people, JSON for programs."""

from __future__ import annotations

import csv
import json
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

WIDTH = 140
"""Columns of a line of prose in a page."""


def table(head: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """In Markdown."""
    titles, *lines = ("| " + " | ".join(line) + " |" for line in (head, *body))
    return "\n".join([titles, "|" + "---|" * len(head), *lines])


def rows(columns: Mapping[str, str], found: Iterable[object]) -> str:
    """A table with a line for each of `found`: by title, the column's format, such as `{0.seconds:.1f} s`."""
    return table(list(columns), ([form.format(one) for form in columns.values()] for one in found))


def deliver(text: str, found: Any, json_file: str | None) -> None:
    """Print `text`, and write `found` as JSON where `--json` says; with `-` the JSON stands on stdout alone."""
    if json_file != "-":
        print(text)
    write_json(found, json_file)


def write_json(found: Any, json_file: str | None) -> None:
    """To a file, to stdout where it is `-`, or nowhere. Raises OSError."""
    if not json_file:
        return
    text = json.dumps(found, indent=2)
    if json_file == "-":
        print(text)
    else:
        Path(json_file).write_text(text + "\n", encoding="utf-8")


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """All columns of all rows, in the order in which they first appear. Raises OSError."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    with path.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, names, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def write_between(page: Path, begin: str, end: str, text: str) -> None:
    """Replace what lies between a page's two marks. Raises ValueError, one sentence, where it has none."""
    whole = page.read_text(encoding="utf-8")
    if begin not in whole or end not in whole:
        raise ValueError(f"{page} has no place for the results: a line {begin!r} and a line {end!r}.")
    before, _, rest = whole.partition(begin)
    page.write_text(f"{before}{begin}\n\n{text}\n{end}{rest.partition(end)[2]}", encoding="utf-8")


def wrapped(text: str) -> str:
    """The same Markdown in lines that an editor shows whole."""
    return "\n".join(
        textwrap.fill(line, WIDTH, break_long_words=False, break_on_hyphens=False) for line in text.splitlines()
    )


def listed(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def bullets(lines: Sequence[str]) -> str:
    """A Markdown list, to go after a sentence."""
    return "\n\n" + "\n".join(f"- {line}" for line in lines)
