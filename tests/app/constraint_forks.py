"""Processes that try constraints, forked from one that has imported vLLM: each import takes eight seconds of a core.

What a fork does is `app.openai.constraint_worker.main`, as in the process that an ingress starts. The tests of a whole
server start that one. Run as a program, this module is the process that forks.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
from multiprocessing.connection import Connection

import psutil

from app.openai.constraint_worker import main
from configs.model_folder import PROJECT_ROOT

_PID_BYTES = 4


class Fork:
    """A process as `subprocess.Popen` shows it: what a pool asks of one."""

    def __init__(self, forks: Forks) -> None:
        self._forks = forks
        self.pid = 0

    def kill(self) -> None:
        """End it, also where it has not begun yet."""
        self._forks.hear_of(self)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def wait(self) -> None:
        """Return when it has ended; the process that forked it does not leave it behind."""
        with contextlib.suppress(psutil.NoSuchProcess):
            psutil.Process(self.pid).wait()


class Forks:
    """The process that forks, started when first needed. Any thread may call."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._unheard: list[Fork] = []

    def start(self, pipe: Connection) -> Fork:
        """Have a fork serve trials on this end of a pipe. Does not wait until it does."""
        with self._lock, contextlib.closing(pipe):
            if self._process is None:
                self._socket, theirs = socket.socketpair()
                command = [sys.executable, "-m", "tests.app.constraint_forks", str(theirs.fileno())]
                self._process = subprocess.Popen(command, cwd=PROJECT_ROOT, pass_fds=[theirs.fileno()])
                theirs.close()
            socket.send_fds(self._socket, [b"."], [pipe.fileno()])
            self._unheard.append(Fork(self))
            return self._unheard[-1]

    def hear_of(self, fork: Fork) -> None:
        """Wait until a fork's process id is known."""
        with self._lock:
            while not fork.pid:
                told = self._socket.recv(_PID_BYTES, socket.MSG_WAITALL)
                assert told, "the process that forks has ended"
                self._unheard.pop(0).pid = int.from_bytes(told, "big")

    def end(self) -> None:
        """End the process that forks; forks end with their pipes."""
        if self._process is not None:
            self._socket.close()
            self._process.wait()


def _serve(descriptor: int) -> None:
    """Fork for each descriptor that comes, until the socket is closed."""
    import vllm.sampling_params  # noqa: F401
    import vllm.tokenizers  # noqa: F401
    import vllm.v1.request  # noqa: F401
    import vllm.v1.structured_output  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no fork is left behind
    asked = socket.socket(fileno=descriptor)
    while True:
        _, descriptors, _, _ = socket.recv_fds(asked, 1, 1)
        if not descriptors:
            return
        pid = os.fork()
        if not pid:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # it forks, too, and wants to know
            asked.close()
            try:
                main(descriptors[0])
            finally:
                os._exit(0)
        os.close(descriptors[0])
        asked.send(pid.to_bytes(_PID_BYTES, "big"))


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
