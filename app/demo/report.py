"""The demo's table, printed row by row as the demo goes on, and the same as data."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from app.demo.known_kv import TokensBySource

WIDTH_ELSEWHERE = 120
"""Columns where the output is no terminal, which could tell its own."""
_WIDEST_TEXT = 76
_NARROW = 96
"""Below this width the expected counts are left out: the mark still tells, and a wrong row says what was expected."""
_SOURCES = {"device": "device", "cpu": "CPU tier", "redis": "Redis", "recomputed": "computed"}


@dataclass(frozen=True)
class ReportRow:
    """One step of the demo: what was done, what came of it, what had to, and everything that is wrong with it.

    A row without `tokens` sent no prompt; a row that was `skipped` did nothing.
    """

    scene: str
    question: str = ""
    replica: str = ""
    ttft_s: float | None = None
    tokens: TokensBySource | None = None
    expected: TokensBySource | None = None
    answer: str = ""
    notes: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    skipped: bool = False


class Report:
    """Collects rows and prints each at once; a context manager around the demo.

    Each row is printed as a table of its own with fixed widths: a table that grows in place would hide its newest rows
    in a terminal that is lower than it, and print nothing until its end in a pipe.
    """

    def __init__(self, console: Console) -> None:
        if not console.is_terminal:
            console.width = WIDTH_ELSEWHERE
        self.rows: list[ReportRow] = []
        self._console = console
        self._spinner = console.status("")

    def __enter__(self) -> Report:
        heading = self._table()
        titles = ["", "turn, question, answer", "on", "TTFT", *_SOURCES.values(), *["to reuse"] * self._is_wide, ""]
        heading.add_row(*(f"[bold]{title}[/]" for title in titles))
        self._console.print(heading)
        self._spinner.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._spinner.stop()

    @property
    def passed(self) -> bool:
        """Whether nothing was wrong so far."""
        return not any(row.problems for row in self.rows)

    def doing(self, step: str) -> None:
        """Say what is under way, below the rows."""
        self._spinner.update(escape(step))

    def add(self, row: ReportRow) -> None:
        """Print a row."""
        self.rows.append(row)
        counts = asdict(row.tokens) if row.tokens else {}
        cells = [str(counts[name] or "·") if counts else "" for name in _SOURCES]
        table = self._table()
        table.add_row(
            f"[dim]{len(self.rows)}[/]",
            _text(row),
            row.replica,
            "" if row.ttft_s is None else f"{row.ttft_s * 1000:.0f} ms",
            *cells,
            *[_reuse(row.expected)] * self._is_wide,
            _mark(row),
        )
        self._console.print(table)

    def as_data(self) -> list[dict[str, Any]]:
        """The rows for JSON; `passed` is null for a row that was skipped."""
        return [{"passed": None if row.skipped else not row.problems, **asdict(row)} for row in self.rows]

    @property
    def _is_wide(self) -> bool:
        return self._console.width >= _NARROW

    def _table(self) -> Table:
        widths = [2, 0, 2, 7, *(max(6, len(title)) for title in _SOURCES.values()), *[12] * self._is_wide, 1]
        rest = self._console.width - sum(widths) - 2 * (len(widths) - 1)
        table = Table.grid(padding=(0, 2, 1, 0))
        for number, width in enumerate(widths):
            table.add_column(
                width=width or max(16, min(rest, _WIDEST_TEXT)),
                justify="left" if number == 1 else "right",
                overflow="fold",
            )
        return table


def _text(row: ReportRow) -> str:
    lines = [f"[bold]{escape(row.scene)}[/]"]
    lines += [f"[cyan]{escape(row.question)}[/]"] if row.question else []
    lines += [escape(row.answer)] if row.answer else []
    lines += [f"[dim italic]{escape(note)}[/]" for note in row.notes]
    lines += [f"[red]{escape(problem)}[/]" for problem in row.problems]
    return "\n".join(lines)


def _reuse(expected: TokensBySource | None) -> str:
    if expected is None:
        return ""
    tiers = [f"{count} {_SOURCES[name]}" for name, count in asdict(expected).items() if count and name != "recomputed"]
    return "\n".join(tiers) or "nothing"


def _mark(row: ReportRow) -> str:
    if row.skipped:
        return "[dim]-[/]"
    return "[bold red]✗[/]" if row.problems else "[green]✓[/]"
