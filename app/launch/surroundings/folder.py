"""The server's private folder: sockets, logs and tokens lie there while it runs.

A socket's path has an end: 107 bytes with Linux, 97 with HAProxy. Ray writes paths into commands and HAProxy's
configuration without quotes. So TMPDIR, as Slurm, macOS and users set it, may not do; then /tmp is taken.
"""

from __future__ import annotations

import os
import shlex
import tempfile
from pathlib import Path

from configs.settings import SettingsError

LONGEST_BYTES = 97 - len(f"/haproxy/{'0' * 56}/s")
"""Of the private folder's path. Below it Ray's id of a node, of 56 characters, is the longest way to a socket."""
PLACES = ("/tmp", "/var/tmp", "/dev/shm")
"""In this order, where TMPDIR does not do."""
_PREFIX = "crosskv-"
_RANDOM = 8
"""Characters that `mkdtemp` adds."""


def private_folder() -> Path:
    """A new folder that this user alone can enter, for Ray's sockets and logs: Ray opens its own ones to all users.

    Raises SettingsError where there is no place for it.
    """
    return Path(tempfile.mkdtemp(prefix=_PREFIX, dir=place()))


def place() -> str:
    """The folder in which private ones are made: TMPDIR, or the first of `PLACES` where that does not do.

    Raises SettingsError, one sentence, where none does.
    """
    reasons = {folder: _why_not(folder) for folder in dict.fromkeys((_wanted(), *PLACES))}
    found = next((folder for folder, why in reasons.items() if why is None), None)
    if found is None:
        raise SettingsError(
            f"TMPDIR: sockets can lie in none of {', '.join(f'{folder} ({why})' for folder, why in reasons.items())}; "
            f"make /tmp writable, or set TMPDIR to a folder of at most {_longest_place()} bytes without blanks."
        )
    return found


def warning() -> str | None:
    """What to say where TMPDIR is not used. Raises as `place` does."""
    wanted, found = _wanted(), place()
    if wanted == found:
        return None
    return f"TMPDIR: {wanted} is {_why_not(wanted)}, so sockets and temporary files lie in {found}."


def _wanted() -> str:
    return os.environ.get("TMPDIR") or PLACES[0]


def _longest_place() -> int:
    return LONGEST_BYTES - len(f"/{_PREFIX}") - _RANDOM


def _why_not(folder: str) -> str | None:
    if not Path(folder).is_absolute():
        return "no absolute path"
    if shlex.quote(folder) != folder:
        return "a path that a shell would not take without quotes"
    if len(os.fsencode(folder)) > _longest_place():
        return "too long a path for a socket"
    if not Path(folder).is_dir():
        return "not there"
    if not os.access(folder, os.W_OK | os.X_OK):
        return "not writable"
    return None
