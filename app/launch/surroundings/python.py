"""How Python runs in the server's processes: by a path that Ray can write into a command, as Ray and Serve expect it.

Ray's raylet starts workers by a command without quotes. An environment in a folder with a blank is entered through a
link (`requirements/plain_path.py`), so its interpreter's path is plain by the time that anything here runs.
"""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import sys

from configs.settings import SettingsError

DROPPED = frozenset({"PYTHONOPTIMIZE", "PYTHONWARNINGS", "PYTHONDEVMODE", "PYTHONINSPECT", "PYTHONIOENCODING"})
"""Ray does not start without docstrings (it extends some), or where its own warnings are errors; a worker with
PYTHONINSPECT reads its input when it has ended. They were meant for programs of the shell that has set them."""
UNSAID = frozenset({"PYTHONDONTWRITEBYTECODE"})
"""Dropped as well, and not worth a word, for many containers set it: each process would compile all that it imports, at
each start. Where nothing can be written, Python goes on without."""


def require_plain_path() -> None:
    """Raise SettingsError where Ray could not start a worker: it would try without an end."""
    if shlex.quote(sys.executable) != sys.executable:
        raise SettingsError(
            f"Ray starts workers by a command without quotes, which the path of this Python needs: {sys.executable}; "
            f"run `make install`, which lets it be reached through a link in /tmp, or use a folder with a plain path."
        )


def warning() -> str | None:
    """What to say where variables are not handed on."""
    dropped = sorted(name for name in DROPPED if os.environ.get(name))
    return f"Not for the server's processes, and so not handed on: {', '.join(dropped)}." if dropped else None


def server_environment(place: str) -> dict[str, str]:
    """A copy of this process's environment for those of the server; temporary files lie in `place`.

    All text is UTF-8, whatever the locale.
    """
    kept = {name: value for name, value in os.environ.items() if name not in DROPPED | UNSAID}
    return kept | {"PYTHONUTF8": "1", "TMPDIR": place}


def show_what_can_be_shown() -> None:
    """Let a character that the terminal's encoding lacks be shown as another one: it is no reason to fail."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, io.UnsupportedOperation):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
