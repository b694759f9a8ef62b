"""The keys of the server that has some, its other secrets, and where any of them can be read."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

from app.launch.run_folder import SECRETS_FILE, run_folder
from load_tests.harness.server import RunningServer

OPERATOR_KEY = "operators-key-7f3a9c"
TENANT_KEYS = {"alpha": "alpha-key-52be10", "beta": "beta-key-e81d44"}
FOREIGN_KEY = "gamma-key-0c96d7"
"""In the environment."""
METRICS_KEY = "metrics-key-b5503e"
COLLECTORS_PASSWORD = "collectors-password-1f82aa"
HUB_TOKEN = "hubs-token-93cc6d"
SERVER_SECRET = 8 * "5ec2e7d1"


def exposing(server: RunningServer, *secrets: str) -> list[str]:
    """Where one of these can be read: files of the run folder and of Ray's, the launcher's output, command lines.

    The file that hands secrets on, which only its owner reads, is passed over.
    """
    words = [secret.encode() for secret in secrets]
    folders = [run_folder(server.port)]
    found = []
    for process in [server.launcher, *server.launcher.children(recursive=True)]:
        with contextlib.suppress(psutil.Error):
            line = process.cmdline()
            folders += [Path(word.partition("=")[2]) for word in line if word.startswith("--temp-dir=")]
            if any(secret in word for word in line for secret in secrets):
                found.append(f"the command line of {line[0]}")
    files = {file for folder in folders for file in folder.rglob("*") if file.is_file()}
    for file in [server.log, *sorted(files)]:
        with contextlib.suppress(FileNotFoundError):  # Ray removes some
            if file.name == SECRETS_FILE and file.stat().st_mode & 0o077 == 0:
                continue
            content = file.read_bytes()
            found += [str(file) for word in words if word in content]
    return found
