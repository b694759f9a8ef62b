"""The options that every command has, and how a key is given: never on the command line, where `ps` shows it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from app.cli.failures import CommandError

URL_VARIABLE, KEY_VARIABLE = "CROSSKV_URL", "CROSSKV_API_KEY"
DEFAULT_URL = "http://127.0.0.1:8000"

Url = Annotated[str, typer.Option(envvar=URL_VARIABLE, help="Where the server answers.")]
KeyFile = Annotated[
    Path | None,
    typer.Option(
        help=f"A file whose first line is the API key. Without it the key is {KEY_VARIABLE}'s, if that is set."
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="The answer as JSON, for machines.")]


def find_key(file: Path | None) -> str | None:
    """The API key; None where there is none. Raises CommandError for one that no request can carry."""
    if file is None:
        key, where = os.environ.get(KEY_VARIABLE, "").strip(), KEY_VARIABLE
    else:
        key, where = _first_line(file), str(file)
        if not key:
            raise CommandError(f"{where} holds no key: write it into the first line.")
    if not key.isascii() or not key.isprintable() or " " in key:
        raise CommandError(f"The key in {where} has characters that no key has: it is one word of ASCII.")
    return key or None


def _first_line(file: Path) -> str:
    try:
        with file.open(encoding="utf-8", errors="replace") as opened:
            return opened.readline(4096).strip()
    except OSError as error:
        raise CommandError(f"{file} cannot be read ({error.strerror}); give a file that holds an API key.") from None
