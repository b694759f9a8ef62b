"""The processes below one process, as they come and go, and the way to end all of them.

The launcher is a *subreaper* (Linux): a process whose own parent dies becomes its child, so that its descendants are
exactly the processes that its server started, Ray's daemons and workers included, and ending them needs no name or
pattern. Elsewhere than on Linux only the descendants that were seen while their parents lived are known.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Iterator
from typing import Protocol

import psutil

TERMINATE_S = 3.0
"""How long a process may take to end after SIGTERM."""
STORE_TERMINATE_S = 10.0
"""The same for a Redis, which writes down what is left in its buffers first."""
_STORES = frozenset({"redis-server", "valkey-server"})
_POLL_S = 0.05
_PR_SET_CHILD_SUBREAPER = 36


def become_subreaper() -> None:
    """Make processes below this one its children when their parents die."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


class Settable(Protocol):
    """What another thread or a handler may set meanwhile."""

    def is_set(self) -> bool:
        """Whether it was set."""
        ...


class Descendants:
    """All processes below `root`, and those that were below it when `note` was called. Use from one thread."""

    def __init__(self, root: psutil.Process) -> None:
        self._root = root
        self._seen: dict[int, psutil.Process] = {}

    def note(self) -> None:
        """Remember who is there now."""
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in self._root.children(recursive=True):
                self._seen.setdefault(process.pid, process)

    def end(self, impatient: Settable) -> int:
        """End all of them: ask first, kill those that take too long. Where `impatient` is set a Redis gets no longer.

        Returns:
            How many had to be killed.
        """
        asked: set[psutil.Process] = set()
        killed: set[psutil.Process] = set()
        started = time.monotonic()
        while left := list(self.living()):  # until none is left: a dying raylet may still have started a worker
            waited_s = time.monotonic() - started
            for process in left:
                with contextlib.suppress(psutil.Error):
                    may_take_longer = process.name() in _STORES and not impatient.is_set()
                    if waited_s > (STORE_TERMINATE_S if may_take_longer else TERMINATE_S):
                        process.kill()
                        killed.add(process)
                    elif process not in asked:
                        process.terminate()
                        asked.add(process)
            time.sleep(_POLL_S)
        return len(killed)

    def living(self) -> Iterator[psutil.Process]:
        """Yield those that are there."""
        self.note()
        for pid, process in list(self._seen.items()):
            with contextlib.suppress(psutil.Error):
                # is_running() compares start times: a number that was given to another program is not ours.
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                    yield process
                    continue
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
            del self._seen[pid]
