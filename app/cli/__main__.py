"""The commands of `crosskv`, which `python -m app.cli` is too, and what the entry point calls."""

from __future__ import annotations

import os
import sys

import typer

from app.cli.check import check
from app.cli.clear import clear
from app.cli.demo.command import demo
from app.cli.doctor.command import doctor
from app.cli.failures import tells_failures
from app.cli.prompts import lookup, pin, unpin
from app.cli.status import status
from app.cli.top import top
from app.cli.trie import trie
from app.launch.surroundings.python import show_what_can_be_shown

REST = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""For `typer`: every argument that is not named here is the program's, `--help` too."""


@tells_failures
def serve(context: typer.Context) -> None:
    """Start the server in the foreground, as `make serve` does; Ctrl-C stops it. `crosskv serve --help` shows more."""
    # The process becomes the program of `make serve`: signals, exit codes and how a launcher is found are its own.
    # -P: what lies in the working directory is not taken for a part of the project.
    os.execv(sys.executable, [sys.executable, "-P", "-m", "app.launch", *context.args])


app = typer.Typer(
    name="crosskv",
    help="crosskv from a terminal. The key of a server that wants one is CROSSKV_API_KEY's, or --key-file's.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # help as plain text; errors in one line
    pretty_exceptions_enable=False,  # they show local variables, keys among them
)
app.command(context_settings=REST)(serve)
for command in (status, top, lookup, pin, unpin, clear, trie, check, doctor, demo):
    app.command()(command)


def main() -> None:
    """The entry point `crosskv`."""
    show_what_can_be_shown()
    app()


if __name__ == "__main__":
    main()
