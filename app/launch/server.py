"""The running server, as its parent sees it: one child, everything that child started, and the way to end all of it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any

import psutil

from app.launch.cluster import ray_environment, write_token
from app.launch.descendants import Descendants, Settable, become_subreaper
from app.launch.haproxy import StandIn, haproxy_environment
from app.launch.log_file import write_objects
from app.launch.plan import LaunchPlan
from app.launch.run_folder import make_private, remove_secrets, write_configuration
from app.launch.surroundings.folder import private_folder
from app.launch.surroundings.python import server_environment
from configs.model_folder import PROJECT_ROOT
from configs.secret.api_keys import KEYS_VARIABLE

RAY_STOP_S = 15.0
"""Serve lets its replicas finish running requests (`http.drain_s`); Ray then ends its daemons within this time."""
STARTING_STOP_S = 10.0
"""Before the application runs there is no request to wait for. An interrupt may be lost then: Python drops one that
comes while an import calls back."""
LAST_LINES_S = 5.0
"""What the ended child has said is written by then."""
LONG_STOP_S = 8.0
"""A server without requests has ended by then."""


_DEAD_WORKER = re.compile(r"worker process\D*(\d+)\D.* The process is dead, probably it crashed during start")
_RAYS_OWN = (":", "[20")
"""How lines begin that are no worker's: what a log is of, and the raylet's own, which begin with the date."""


class Server:
    """`serve run` in a session of its own. Use from one thread; `status` is filled by a reader thread."""

    def __init__(self, plan: LaunchPlan) -> None:
        self.log_path = plan.run_folder / "server.log"
        self.status: dict[str, Any] = {"phase": "start"}
        self._plan = plan
        self._has_run = False
        self._ray_folder: Path | None = None
        self._child: subprocess.Popen[bytes] | None = None
        self._stand_in: StandIn | None = None
        self._writer: threading.Thread | None = None
        self._descendants = Descendants(psutil.Process())

    def start(self) -> None:
        """Write the merged configuration and start the child. Its output goes to `log_path`; the last log is kept."""
        become_subreaper()
        make_private(self._plan.run_folder)
        config_path = write_configuration(self._plan.run_folder, self._plan.serve_config, self._plan.settings)
        if self.log_path.exists():
            self.log_path.replace(self.log_path.with_name("server.log.1"))
        self._ray_folder = private_folder()
        self._stand_in = StandIn(self._ray_folder)
        token = write_token(self._plan.run_folder)
        # Its keys stand in the configuration by now, as digests.
        inherited = server_environment(str(self._ray_folder.parent))
        inherited.pop(KEYS_VARIABLE, None)
        status_read, status_write = os.pipe()
        with self._log() as log:
            self._child = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "app.launch.serve_run",
                    str(config_path),
                    str(self._ray_folder),
                    str(status_write),
                ],
                cwd=PROJECT_ROOT,
                env=inherited | ray_environment(self._plan.settings, token) | haproxy_environment(self._ray_folder),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(status_write,),
                # A terminal's Ctrl-C reaches the parent only, which then stops things in order. A session would do so
                # too, but Linux shares a machine out by sessions (sched(7), autogroup): one that starts while another
                # is busy was seen to get next to nothing.
                process_group=0,
            )
        os.close(status_write)
        threading.Thread(target=self._read_status, args=(status_read,), daemon=True).start()

    def _log(self) -> IO[bytes]:
        """Where the child writes: to the file itself, or to a thread that makes objects of its lines."""
        file = self.log_path.open("wb")
        if self._plan.settings.http.log_format != "json":
            return file
        read, write = os.pipe()
        self._writer = threading.Thread(target=write_objects, args=(os.fdopen(read, "rb"), file), daemon=True)
        self._writer.start()
        return os.fdopen(write, "wb")

    def look(self) -> None:
        """Put another HAProxy into a dead one's place. To be called a few times a second while the server runs."""
        if self._stand_in is not None:
            self._stand_in.look()

    @property
    def exit_code(self) -> int | None:
        """The child's exit code; None while it runs."""
        return self._child.poll() if self._child else None

    def stop(self, impatient: Settable, takes_long: Callable[[], None] = lambda: None) -> int:
        """End the server and all it started; at once where `impatient` is set.

        `takes_long` is called once when it has not ended after `LONG_STOP_S`: it is waiting for requests then.

        Returns:
            How many processes had to be killed because they did not end by themselves.
        """
        self._descendants.note()
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.SIGINT)
            timeout_s = self._plan.settings.http.drain_s + RAY_STOP_S if self._has_run else STARTING_STOP_S
            started, told = time.monotonic(), False
            while self._child.poll() is None and not impatient.is_set():
                waited_s = time.monotonic() - started
                if waited_s > timeout_s:
                    break
                if waited_s > LONG_STOP_S and not told:
                    told = True
                    takes_long()
                self._descendants.note()
                time.sleep(0.1)
        if self._stand_in is not None:
            self._stand_in.close()  # no sooner: requests that are let end may come through it
        killed = self._descendants.end(impatient)
        if self._child is not None:
            self._child.wait()
        if self._writer is not None:
            self._writer.join(LAST_LINES_S)
        remove_secrets(self._plan.run_folder)
        if self._ray_folder is not None:
            shutil.rmtree(self._ray_folder, ignore_errors=True)
        return killed

    def last_lines(self, count: int) -> list[str]:
        """The log's last lines that say something."""
        try:
            lines = self.log_path.read_text(errors="replace", encoding="utf-8").splitlines()
        except OSError:
            return []
        return [line for line in lines if line.strip()][-count:]

    def dead_workers(self) -> list[str]:
        """The last lines of processes that Ray has started, and that ended before they had told it that they live.

        Leans on Ray: what the raylet logs of them, and the names of workers' own logs, which end with their number.
        """
        if self._ray_folder is None:
            return []
        logs = self._ray_folder / "ray" / "session_latest" / "logs"
        with contextlib.suppress(OSError):
            raylet = (logs / "raylet.out").read_text(encoding="utf-8", errors="replace")
            return [_last_line(logs, number) for number in _DEAD_WORKER.findall(raylet)]
        return []

    def _read_status(self, fd: int) -> None:
        with os.fdopen(fd, encoding="utf-8") as lines:
            for line in lines:
                self.status = json.loads(line)
                self._has_run = self._has_run or self.status.get("status") == "RUNNING"


def _last_line(logs: Path, number: str) -> str:
    """What a worker has said last: into the raylet's own log until it had one; nothing where both are empty."""
    for file in [*logs.glob(f"worker-*-{number}.err"), *logs.glob(f"worker-*-{number}.out"), logs / "raylet.err"]:
        with contextlib.suppress(OSError):
            lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
            if said := [line.strip() for line in lines if line.strip() and not line.startswith(_RAYS_OWN)]:
                return said[-1]
    return f"process {number} ended without a word"
