"""What cannot be done is said in one line on stderr, and by the exit code; never by a traceback."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import typer
from rich.console import Console

from app.cli.terminal import line

DONE, NOT_SO, CANNOT = 0, 1, 2
"""Exit codes: done; the answer is no (refused, not well, advice); nothing could be done or seen (no server, no key)."""

P = ParamSpec("P")
T = TypeVar("T")


class CommandError(Exception):
    """The command ends. `str()` of it is one sentence for a person; `exit_code` is one of the above.

    `status`: the HTTP status that the server refused with; None where it did not answer.
    """

    def __init__(self, message: str, exit_code: int = CANNOT, status: int | None = None) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.status = status


def tells_failures(command: Callable[P, T]) -> Callable[P, T]:
    """A command whose `CommandError` is told as this module's docstring says."""

    @functools.wraps(command)
    def told(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return command(*args, **kwargs)
        except CommandError as error:
            Console(stderr=True, soft_wrap=True).print(line(str(error)))
            raise typer.Exit(error.exit_code) from None

    return told
