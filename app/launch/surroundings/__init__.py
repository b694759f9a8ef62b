"""What the server's processes need of their surroundings: provided where possible, else refused in one sentence.

folder.py   a private folder with a short, plain path, for sockets
files.py    how many files a process may open, and the connections of HAProxy that fit
python.py   the interpreter's path, the variables that change how Python runs, and a terminal that lacks a character

Asked by `app.launch.plan` before anything starts. Imports neither Ray nor vLLM.
"""

from __future__ import annotations

from app.launch.surroundings import files, folder, python


def require_surroundings() -> None:
    """Raise SettingsError, one sentence, where the server cannot run here."""
    python.require_plain_path()
    files.require_files()
    folder.place()


def surroundings_warnings() -> list[str]:
    """What was done differently for the sake of the surroundings, a sentence each."""
    return [said for said in (folder.warning(), files.warning(), python.warning()) if said is not None]
