"""The folder for what the server itself writes: `.crosskv` in the project, or elsewhere where that is read-only."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from configs.model_folder import PROJECT_ROOT

OWN_FOLDER_VARIABLE = "CROSSKV_FOLDER"
"""The environment variable that moves it. No setting: commands that read no settings find a server's files, too."""
OWN_FOLDER = ".crosskv"
_PROBE_BYTES = 1 << 16
"""About what the merged configuration and a log's first lines take: on a full disk an empty file can be made."""


def own_folder() -> Path:
    """Where it is, as an absolute path; nothing is created. The variable's path is relative to the project."""
    return (PROJECT_ROOT / Path(os.environ.get(OWN_FOLDER_VARIABLE) or OWN_FOLDER).expanduser()).resolve()


def in_project(path: str) -> Path:
    """A setting's path as an absolute one: relative to the project, and what lies in `.crosskv` moves with it."""
    given = Path(path).expanduser()
    inside = given.parts[:1] == (OWN_FOLDER,)
    return (own_folder().joinpath(*given.parts[1:]) if inside else PROJECT_ROOT / given).resolve()


def why_not_writable(folder: Path) -> str | None:
    """Why no file could be written in a folder, which need not be there yet; None where one could. Leaves nothing."""
    place = next(path for path in (folder, *folder.parents) if path.exists())
    probe = place / f".crosskv-probe-{os.getpid()}"
    try:
        probe.write_bytes(bytes(_PROBE_BYTES))
    except OSError as error:
        return error.strerror or str(error)
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()
    return None
