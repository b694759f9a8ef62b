"""The running server, as its parent sees it: one child, everything that child started, and the way to end all of it.

The parent is a *subreaper* (Linux): a process whose own parent dies becomes its child, so that its descendants are
exactly the processes that this server started, Ray's daemons and workers included, and ending them needs no name or
pattern. Elsewhere than on Linux only the descendants that were seen while their parents lived are known.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import psutil
import yaml

from app.launch.cluster import ray_environment
from app.launch.plan import LaunchPlan
from configs.model_folder import PROJECT_ROOT

_PR_SET_CHILD_SUBREAPER = 36
_GRACEFUL_STOP_S = 15.0  # Serve drains its replicas, Ray ends its daemons
_TERMINATE_S = 3.0


class Server:
    """`serve run` in a session of its own. Use from one thread; `status` is filled by a reader thread."""

    def __init__(self, plan: LaunchPlan) -> None:
        self.log_path = plan.run_folder / "server.log"
        self.status: dict[str, Any] = {"phase": "start"}
        self._plan = plan
        self._child: subprocess.Popen[bytes] | None = None
        self._seen: dict[int, psutil.Process] = {}

    def start(self) -> None:
        """Write the merged configuration and start the child. Its output goes to `log_path`."""
        _become_subreaper()
        self._plan.run_folder.mkdir(parents=True, exist_ok=True)
        config_path = self._plan.run_folder / "serve_config.yaml"
        config_path.write_text(yaml.safe_dump(self._plan.serve_config, sort_keys=False))
        status_read, status_write = os.pipe()
        with self.log_path.open("wb") as log:
            self._child = subprocess.Popen(
                [sys.executable, "-m", "app.launch.serve_run", str(config_path), str(status_write)],
                cwd=PROJECT_ROOT,
                env=os.environ | ray_environment(self._plan.settings),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(status_write,),
                start_new_session=True,  # a terminal's Ctrl-C reaches the parent only, which then stops things in order
            )
        os.close(status_write)
        threading.Thread(target=self._read_status, args=(status_read,), daemon=True).start()

    @property
    def exit_code(self) -> int | None:
        """The child's exit code; None while it runs."""
        self._note_descendants()
        return self._child.poll() if self._child else None

    def stop(self, impatient: threading.Event) -> int:
        """End the server and all it started; at once where `impatient` is set.

        Returns:
            How many processes had to be killed because they did not end by themselves.
        """
        self._note_descendants()
        if self._child is not None and self._child.poll() is None:
            self._child.send_signal(signal.SIGINT)
            deadline = time.monotonic() + _GRACEFUL_STOP_S
            while self._child.poll() is None and time.monotonic() < deadline and not impatient.is_set():
                self._note_descendants()
                time.sleep(0.1)
        return self._end_descendants()

    def last_lines(self, count: int) -> list[str]:
        """The log's last lines that say something."""
        try:
            lines = self.log_path.read_text(errors="replace").splitlines()
        except OSError:
            return []
        return [line for line in lines if line.strip()][-count:]

    def _read_status(self, fd: int) -> None:
        with os.fdopen(fd) as lines:
            for line in lines:
                self.status = json.loads(line)

    def _note_descendants(self) -> None:
        for process in psutil.Process().children(recursive=True):
            self._seen.setdefault(process.pid, process)

    def _living(self) -> Iterator[psutil.Process]:
        self._note_descendants()
        for pid, process in list(self._seen.items()):
            with contextlib.suppress(psutil.Error):
                # is_running() compares start times: a number that was given to another program is not ours.
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    yield process
                    continue
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
            del self._seen[pid]

    def _end_descendants(self) -> int:
        for process in self._living():
            with contextlib.suppress(psutil.Error):
                process.terminate()
        deadline = time.monotonic() + _TERMINATE_S
        while (left := list(self._living())) and time.monotonic() < deadline:
            time.sleep(0.05)
        killed = len(left)
        while left := list(self._living()):  # until none is left: a dying raylet may still have started a worker
            for process in left:
                with contextlib.suppress(psutil.Error):
                    process.kill()
            time.sleep(0.05)
        if self._child is not None:
            self._child.wait()
        return killed


def _become_subreaper() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
