"""Showing what a server said. Its text may be a stranger's prompt, so nothing in it is obeyed.

Every piece of text becomes a `rich.text.Text`, in which no markup and no emoji code is read. It loses what is no
visible character: terminal escapes, line breaks, marks that turn the writing direction, halves of characters.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

MOST_CHARACTERS = 400
"""Of one piece of text; more is cut."""
_REPLACEMENT = "�"


def plain(value: object, most: int = MOST_CHARACTERS) -> str:
    """`value` as one line of visible characters, `most` of them."""
    text = str(value)
    seen = "".join(map(_visible, text[:most]))
    return seen if len(text) <= most else f"{seen}…"


def line(value: object, style: str = "", most: int = MOST_CHARACTERS) -> Text:
    """The same, ready to be shown."""
    return Text(plain(value, most), style=style)


def table(*headings: str) -> Table:
    """An empty table; a heading that ends with `>` is of a column of numbers."""
    made = Table(box=None, pad_edge=False, header_style="bold")
    for heading in headings:
        name = heading.removesuffix(">")
        made.add_column(Text(name), justify="right" if name != heading else "left", overflow="fold")
    return made


def add_row(to: Table, cells: Sequence[object]) -> None:
    """One row of a table. What is a `Text` already is shown as it is."""
    to.add_row(*(cell if isinstance(cell, Text) else line("" if cell is None else cell) for cell in cells))


def print_json(console: Console, value: Any) -> None:
    """For machines: one JSON document, in ASCII, so that a terminal shows escapes and does not obey them."""
    console.file.write(json.dumps(value, indent=2, ensure_ascii=True) + "\n")


def size(nbytes: float | None) -> str:
    """Bytes in a unit that fits."""
    if nbytes is None:
        return "?"
    for unit in ("B", "KiB", "MiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} GiB"


def share(part: float, whole: float) -> str:
    """A part in per cent."""
    return f"{100 * part / whole:.0f} %" if whole else "-"


def _visible(character: str) -> str:
    if character.isspace():
        return " "
    return _REPLACEMENT if unicodedata.category(character).startswith("C") else character
