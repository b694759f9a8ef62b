"""Standard output and error of a program of the project, on any terminal."""

from __future__ import annotations

import contextlib
import io
import sys


def show_what_can_be_shown() -> None:
    """Let a character that the terminal's encoding lacks be shown as another one: it is no reason to fail."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, io.UnsupportedOperation):
            stream.reconfigure(errors="replace")  # type: ignore[union-attr]
