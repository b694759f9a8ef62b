"""What programs have in common: options, progress, and how each ends.

Exit codes: 0 measured; 1 measured, but a target was missed or a point left out; 2 something is missing or wrong (one
sentence says what); 130 interrupted.
"""

from __future__ import annotations

import contextlib
import signal
import tempfile
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from load_tests.measuring.report import deliver, write_between

EXIT_FELL_SHORT, EXIT_INPUT, EXIT_STOPPED = 1, 2, 130

out = Console(stderr=True, highlight=False, soft_wrap=True)
"""What is said meanwhile; stdout is for the result."""

JsonFile: TypeAlias = Annotated[str | None, typer.Option("--json", help="A file, or - for stdout.")]


class InputError(Exception):
    """What was asked for cannot be done. One sentence that says what would work."""


@contextlib.contextmanager
def one_sentence(*errors: type[Exception]) -> Iterator[None]:
    """End the program with the sentence of an InputError, or of one of `errors`."""
    sentences: tuple[type[Exception], ...] = (InputError, *errors)
    try:
        yield
    except sentences as error:
        out.print(str(error), markup=False)
        raise typer.Exit(EXIT_INPUT) from None


def chosen(kind: str, words: Iterable[str], known: Collection[str]) -> tuple[str, ...]:
    """The words without blanks and repeats. Raises InputError for none, and for one that is not known."""
    names = tuple(dict.fromkeys(word.strip() for word in words if word.strip()))
    for name in names:
        if name not in known:
            raise InputError(f"There is no {kind} {name!r}; choose from {', '.join(known)}.")
    if not names:
        raise InputError(f"No {kind} is named; choose from {', '.join(known)}.")
    return names


def writable(folder: Path, option: str) -> Path:
    """The folder, made where it is absent. Raises InputError when nothing can be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError as error:
        raise InputError(
            f"{folder} cannot be written to ({error.strerror}); name another folder with {option}."
        ) from None


def progress_bar(unit: str = "") -> Progress:
    """How far a program is; it leaves nothing behind."""
    words = (TextColumn(unit),) if unit else ()
    return Progress(
        TextColumn("{task.description}"), BarColumn(bar_width=20), MofNCompleteColumn(), *words, TimeElapsedColumn(),
        console=out, transient=True,
    )  # fmt: skip


def stop_by_signal() -> None:
    """SIGTERM is as Ctrl-C, which a shell's background jobs ignore unless told: what is there is kept."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)


@dataclass(frozen=True)
class Block:
    """The part of a page that a program writes: what lies between two lines."""

    page: Path
    begin: str
    end: str


def conclude(
    text: str,
    found: Any,
    json_file: str | None,
    misses: Sequence[str] = (),
    block: Block | None = None,
    in_block: str | None = None,
) -> None:
    """End a program: print `text`, write `found` as JSON, and put `in_block`, or the whole `text`, into the page.

    `misses`: a sentence for each target that was missed; those that `text` lacks are said on stderr. Raises typer.Exit
    where there are any, and ends with one sentence where the page has no place for the block.
    """
    deliver(text, found, json_file)
    if block is not None:
        with one_sentence(ValueError):
            write_between(block.page, block.begin, block.end, text if in_block is None else in_block)
    for sentence in misses:
        if sentence not in text:
            out.print(sentence, markup=False)
    if misses:
        raise typer.Exit(EXIT_FELL_SHORT)
