"""`crosskv serve` and `crosskv demo`: this process becomes the program that `make serve` or `make demo` runs.

There is one way to do each: signals, exit codes and how a launcher is found are theirs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from urllib.parse import urlsplit

import typer

from app.cli.failures import CommandError, tells_failures
from app.cli.options import DEFAULT_URL, KEY_VARIABLE, KeyFile, Url, find_key

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
