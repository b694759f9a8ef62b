"""The commands of `crosskv`, and what the entry point calls."""

from __future__ import annotations

import typer

from app.cli.become import REST, demo, serve
from app.cli.check import check
from app.cli.clear import clear
from app.cli.doctor.command import doctor
from app.cli.prompts import lookup, pin, unpin
from app.cli.status import status
from app.cli.top import top
from app.cli.trie import trie
from app.launch.surroundings.streams import show_what_can_be_shown

app = typer.Typer(
    name="crosskv",
    help="crosskv from a terminal. The key of a server that wants one is CROSSKV_API_KEY's, or --key-file's.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,  # help as plain text; errors in one line
    pretty_exceptions_enable=False,  # they show local variables, keys among them
)
app.command(context_settings=REST)(serve)
for command in (status, top, lookup, pin, unpin, clear, trie, check, doctor):
    app.command()(command)
app.command(context_settings=REST)(demo)


def main() -> None:
    """The entry point `crosskv`."""
    show_what_can_be_shown()
    app()
