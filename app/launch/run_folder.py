"""The run folder of a server, one per port: its merged configuration, its log, and which process launched it.

Ray Serve logs the configuration's `args:`, so none of its secrets stands there. While the server runs they lie in a
file of their own, which `secrets_file` names.

`launcher.pid` is there while the launcher runs. A launcher that was killed leaves it behind, and its number may have
been given to another program since: `find_launcher` compares start times, and asks whether it is a launcher at all.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import psutil
import yaml

from configs.own_folder import OWN_FOLDER_VARIABLE, own_folder, why_not_writable
from configs.secret.handed_on import parted, sealed, with_secrets_file
from configs.section import secret_fields
from configs.settings import Settings, SettingsError

RUN_FOLDER = own_folder()
SECRETS_FILE = "secrets.yaml"
_LAUNCHER_FILE = "launcher.pid"
_LAUNCHER_WORD = "app.launch"
"""What a launcher's command line contains: `python -m app.launch …`."""
_CLOCK_STEP_S = 2.0
"""Start times are counted from the machine's start, whose own time shifts a little when the clock is set."""


def run_folder(port: int) -> Path:
    """Where the files of the server on this port lie, so that two servers do not mix."""
    return RUN_FOLDER / str(port)


def make_private(folder: Path) -> None:
    """Make the folder, or take it over, so that this user alone can look inside: keys, passwords and tokens lie there.

    Raises OSError where it belongs to another user.
    """
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    folder.chmod(0o700)


def require_writable(folder: Path) -> None:
    """Raise SettingsError where no run folder could be made, or no file be written in it. Leaves nothing there."""
    if why := why_not_writable(folder):
        raise SettingsError(
            f"{folder}: the server's files cannot be written there ({why}); set {OWN_FOLDER_VARIABLE} to a folder that "
            f"can be written and has room."
        )


def write_configuration(folder: Path, serve_config: Mapping[str, Any], settings: Settings) -> Path:
    """Write what Serve is to read, of `settings` already checked, and its secrets apart; return the path of the first.

    Keys are written as digests, those of `secrets_file` and of the environment among them.
    """
    (application,) = serve_config["applications"]
    args, secrets = parted(with_secrets_file(application["args"]), secret_fields(Settings))
    args = sealed(args, settings.http.api_keys, settings.http.metrics_key)
    remove_secrets(folder)
    if secrets:
        args["secrets_file"] = str(_write_private(folder / SECRETS_FILE, secrets))
    return _write_private(
        folder / "serve_config.yaml", {**serve_config, "applications": [{**application, "args": args}]}
    )


def remove_secrets(folder: Path) -> None:
    """Remove the file of secrets, where there is one. Raises OSError."""
    (folder / SECRETS_FILE).unlink(missing_ok=True)


def _write_private(path: Path, content: Mapping[str, Any]) -> Path:
    path.touch(mode=0o600)
    path.chmod(0o600)
    path.write_text(yaml.safe_dump(content, sort_keys=False), encoding="utf-8")
    return path


@contextlib.contextmanager
def launched_from_here(port: int) -> Iterator[None]:
    """While entered, `find_launcher` finds this process."""
    path = run_folder(port) / _LAUNCHER_FILE
    make_private(path.parent)
    text = json.dumps({"pid": os.getpid(), "started": psutil.Process().create_time()})
    path.write_text(text, encoding="utf-8")
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            if path.read_text(encoding="utf-8") == text:  # not another launcher's
                path.unlink()


def find_launcher(port: int) -> psutil.Process | None:
    """The living launcher of the server on this port of this machine; None when `make serve` did not start it."""
    try:
        noted = json.loads((run_folder(port) / _LAUNCHER_FILE).read_text(encoding="utf-8"))
        process = psutil.Process(int(noted["pid"]))
        same = abs(process.create_time() - float(noted["started"])) < _CLOCK_STEP_S
        return process if same and _LAUNCHER_WORD in process.cmdline() else None
    except (OSError, ValueError, KeyError, TypeError, psutil.Error):
        return None
