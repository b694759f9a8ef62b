"""The commands of `crosskv`, and what the entry point calls."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from urllib.parse import urlsplit

import typer

from app.cli.check import check
from app.cli.clear import clear
from app.cli.doctor.command import doctor
from app.cli.failures import CommandError, tells_failures
from app.cli.options import DEFAULT_URL, KEY_VARIABLE, KeyFile, Url, find_key
from app.cli.prompts import lookup, pin, unpin
from app.cli.status import status
from app.cli.top import top
from app.cli.trie import trie
from app.launch.surroundings.streams import show_what_can_be_shown

# `crosskv serve` and `crosskv demo`: this process becomes the program that `make serve` or `make demo` runs.
#
# There is one way to do each: signals, exit codes and how a launcher is found are theirs.


REST = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}
"""For `typer`: every argument that is not named here is the program's, `--help` too."""


@tells_failures
def serve(context: typer.Context) -> None:
    """Start the server in the foreground, as `make serve` does; Ctrl-C stops it. `crosskv serve --help` shows more."""
    _become("app.launch", context.args)


@tells_failures
def demo(context: typer.Context, url: Url = DEFAULT_URL, key_file: KeyFile = None) -> None:
    """Show on a running server what the shared cache saves, as `make demo` does. `crosskv demo --help` shows more."""
    where = urlsplit(url)
    if where.scheme != "http" or not where.hostname or where.path.strip("/"):
        raise CommandError(f"The demo needs a URL such as {DEFAULT_URL}, not {url!r}.")
    key = find_key(key_file)
    if key is not None:
        os.environ[KEY_VARIABLE] = key
    try:
        port = where.port or 80
    except ValueError:
        raise CommandError(f"{url!r} has no port that could be one.") from None
    host = f"[{where.hostname}]" if ":" in where.hostname else where.hostname
    _become("app.demo", ["--host", host, "--port", str(port), *context.args])


def _become(module: str, arguments: Sequence[str]) -> None:
    # -P: what lies in the working directory is not taken for a part of the project.
    os.execv(sys.executable, [sys.executable, "-P", "-m", module, *arguments])


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
