"""Rows, and the columns of them that the report shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from load_tests.measuring.spread import Spread, number

Row = dict[str, Any]
"""One line of an experiment's CSV."""


@dataclass(frozen=True)
class Column:
    """A column of the report's table. `scale` is multiplied in; `spread`: with the least and the most values too."""

    key: str
    title: str
    scale: float = 1.0
    digits: int = 1
    spread: bool = False

    def cell(self, row: Row) -> str:
        """For Markdown; empty when the row has no such value."""
        value = row.get(self.key)
        if value is None or isinstance(value, str):
            return value or ""
        form = f",.{self.digits}f"
        if not self.spread:
            return number(value * self.scale, form)
        whole = Spread(row[f"{self.key}_min"], value, row[f"{self.key}_max"])
        return whole.bracketed(form, self.scale, to="\u2013")


MODEL = Column("model", "model")
PROMPT = Column("prompt_tokens", "prompt", digits=0)


def ms(key: str, title: str, digits: int = 0, spread: bool = True) -> Column:
    """Seconds, shown as milliseconds."""
    return Column(key, f"{title}, ms", 1e3, digits, spread)


def mib(key: str, title: str, digits: int = 1) -> Column:
    """Bytes, shown as MiB."""
    return Column(key, f"{title}, MiB", 2**-20, digits)
